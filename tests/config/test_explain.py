"""The exact explanations that a user reads for an invalid file."""

from __future__ import annotations

import pickle
import textwrap

import pytest

from decentnode.errors import ConfigError

from .fakes import explain_problems

GOOD = "graph: {name: ring, nodes: 4}\n"

CASES = {
    "not an integer": (
        "graph: {name: ring, nodes: ten}\n",
        """
        a.yaml:1:28: graph.nodes must be an integer, got 'ten'
            graph: {name: ring, nodes: ten}
                                       ^
        """,
    ),
    "an integer in scientific notation": (
        "graph: {name: ring, nodes: 1e3}\n",
        """
        a.yaml:1:28: graph.nodes must be an integer, got '1e3'
            graph: {name: ring, nodes: 1e3}
                                       ^ write 1000
        """,
    ),
    "out of range": (
        GOOD + "seed: -1\nwork: {optimizer: {lr: 0}}\n",
        """
        a.yaml:2:7: seed must be >= 0, got -1
            seed: -1
                  ^
        a.yaml:3:24: work.optimizer.lr must be > 0, got 0
            work: {optimizer: {lr: 0}}
                                   ^
        """,
    ),
    "unknown keys": (
        GOOD + "wrok: 1\nwork:\n  bacth: 3   # a comment\n  zzzz: 1\n  optimizer: {lrr: 1}\n",
        """
        a.yaml:2:1: wrok is not a known key
            wrok: 1
            ^ did you mean 'work'?
        a.yaml:4:3: work.bacth is not a known key
            bacth: 3
            ^ did you mean 'batch'?
        a.yaml:5:3: work.zzzz is not a known key
            zzzz: 1
            ^ known keys: batch, hidden, kind, places, optimizer
        a.yaml:6:15: work.optimizer.lrr is not a known key
            optimizer: {lrr: 1}
                        ^ did you mean 'lr'?
        """,
    ),
    "unknown component": (
        "graph: {name: rnig, nodes: 4}\n",
        """
        a.yaml:1:15: graph.name must be one of ring, regular, file, got 'rnig'
            graph: {name: rnig, nodes: 4}
                          ^ did you mean 'ring'?
        """,
    ),
    "component named no": (
        "graph: {name: no}\n",
        """
        a.yaml:1:15: graph.name must be one of ring, regular, file, got no
            graph: {name: no}
                          ^ YAML reads a bare no as false: quote it
        """,
    ),
    "component without a name": (
        "graph: {nodes: 4}\n",
        """
        a.yaml:1:1: graph.name is missing
            graph: {nodes: 4}
            ^ needs a name: one of ring, regular, file
        """,
    ),
    "a section that is a list": (
        "graph: [ring]\n",
        """
        a.yaml:1:8: graph must be a section such as {name: ring}, got [ring]
            graph: [ring]
                   ^
        """,
    ),
    "an empty section": (
        "graph:\nseed: 1\n",
        """
        a.yaml:1:7: graph must be a section such as {name: ring}, got nothing
            graph:
                  ^
        """,
    ),
    "a missing section": (
        "seed: 1\n",
        """
        a.yaml: graph is missing
        """,
    ),
    "a missing key": (
        "graph: ring\n",
        """
        a.yaml:1:1: graph.nodes is missing
            graph: ring
            ^ How many nodes.
        """,
    ),
    "a bare off where text is an option": (
        GOOD + "work: {kind: off}\n",
        """
        a.yaml:2:14: work.kind must be one of fast, off, got off
            work: {kind: off}
                         ^ YAML reads a bare off as false: quote it
        """,
    ),
    "a nearly right option": (
        GOOD + "work: {kind: fats}\n",
        """
        a.yaml:2:14: work.kind must be one of fast, off, got 'fats'
            work: {kind: fats}
                         ^ did you mean 'fast'?
        """,
    ),
    "a boolean for a number": (
        GOOD + "seed: yes\n",
        """
        a.yaml:2:7: seed must be a number, got yes
            seed: yes
                  ^ YAML reads a bare yes as true
        """,
    ),
    "a quoted boolean": (
        GOOD + "work: {optimizer: {nesterov: 'yes'}}\n",
        """
        a.yaml:2:30: work.optimizer.nesterov must be true or false, got 'yes'
            work: {optimizer: {nesterov: 'yes'}}
                                         ^ write it without quotes, as true or false
        """,
    ),
    "a number for a boolean": (
        GOOD + "work: {optimizer: {nesterov: 1}}\n",
        """
        a.yaml:2:30: work.optimizer.nesterov must be true or false, got 1
            work: {optimizer: {nesterov: 1}}
                                         ^
        """,
    ),
    "a quoted integer": (
        GOOD + "seed: '3'\n",
        """
        a.yaml:2:7: seed must be an integer, got '3'
            seed: '3'
                  ^ write it without quotes
        """,
    ),
    "a date for text": (
        GOOD + "name: 2026-01-01\n",
        """
        a.yaml:2:7: name must be text, got 2026-01-01
            name: 2026-01-01
                  ^ quote it if you mean text
        """,
    ),
    "a number that YAML reads as text": (
        GOOD + "work: {optimizer: {lr: -1e-2}}\n",
        """
        a.yaml:2:24: work.optimizer.lr must be > 0, got -1e-2
            work: {optimizer: {lr: -1e-2}}
                                   ^
        """,
    ),
    "a number for one of two": (
        GOOD + "work: {batch: 2.5}\n",
        """
        a.yaml:2:15: work.batch must be an integer or 'all', got 2.5
            work: {batch: 2.5}
                          ^
        """,
    ),
    "either of two": (
        GOOD + "work: {batch: al}\n",
        """
        a.yaml:2:15: work.batch must be an integer or 'all', got 'al'
            work: {batch: al}
                          ^ did you mean 'all'?
        """,
    ),
    "one of two, and wrong inside": (
        GOOD + "work: {places: {0: a, 1: no}}\n",
        """
        a.yaml:2:26: work.places.1 must be text, got no
            work: {places: {0: a, 1: no}}
                                     ^ YAML reads a bare no as false: quote it
        """,
    ),
    "none of two": (
        GOOD + "work: {places: 3}\n",
        """
        a.yaml:2:16: work.places must be a list or a section of keys and values, got 3
            work: {places: 3}
                           ^
        """,
    ),
    "inside a list": (
        GOOD + "work:\n  hidden:\n    - 64\n    - wide\n",
        """
        a.yaml:5:7: work.hidden[1] must be an integer, got 'wide'
            - wide
              ^
        """,
    ),
    "a number for a name": (
        "name: 0x1F\n" + GOOD,
        """
        a.yaml:1:7: name must be text, got 31
            name: 0x1F
                  ^ YAML reads a bare 0x1F as 31: quote it
        """,
    ),
    "a section where a value belongs": (
        GOOD + "seed: {a: 1}\n",
        """
        a.yaml:2:7: seed must be an integer, got {a: 1}
            seed: {a: 1}
                  ^
        """,
    ),
    "a value where a section belongs": (
        GOOD + "work: 3\n",
        """
        a.yaml:2:7: work must be a section of keys and values, got 3
            work: 3
                  ^
        """,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_explanation_is_the_expected_text(case):
    text, expected = CASES[case]
    assert explain_problems(text) == textwrap.dedent(expected).strip()


def test_1e_minus_3_is_accepted_as_a_number():
    assert explain_problems(GOOD + "work: {optimizer: {lr: 1e-3}}\n") == ""


def test_long_lines_are_cut_around_the_value():
    text = explain_problems(GOOD + "work: {hidden: [" + "1, " * 100 + "x" + ", 1" * 100 + "]}\n")
    line, caret = text.splitlines()[1:]
    assert len(line) <= 104
    assert line[caret.index("^")] == "x"


def test_a_pickled_config_error_keeps_its_problems():
    error = ConfigError(["a.yaml:1: wrong", "a.yaml:2: wrong, too"], "a.yaml")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is ConfigError and str(again) == str(error) and again.problems == error.problems
