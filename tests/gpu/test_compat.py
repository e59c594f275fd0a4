"""Other packages' names on ours, of ranks whose models lie on GPUs: the same steps as theirs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compat import work_decent_dp as decent
from tests.compat import work_scripts, work_sdtl
from tests.compat.test_scripts import check
from tests.gpu.test_ranks import WAYS, on_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize(("options", "average", "hooked"), [
    ({}, 3, True), ({"faithful": True}, 3, False), ({"faithful": True, "transport": "collective"}, 2, True),
    ({"faithful": True, "grad_clip_norm": decent.CLIP, "bucket_size_in_mb": 0}, 0, False),
], ids=["ours", "there", "there, told", "there, clipped"])  # fmt: skip
def test_steps_of_decent_dp(options: dict[str, Any], average: int, hooked: bool) -> None:
    expected = decent.simulated(8, average, "faithful" in options, clipped="grad_clip_norm" in options)
    for rank, (found, told, _) in enumerate(on_gpus(4, "gloo", decent.train, options, 8, average, hooked)):
        assert found == pytest.approx(expected[rank], abs=2e-6) and bool(told) == hooked


@pytest.mark.parametrize(("options", "average", "passes", "evaluates"), [
    ({"faithful": True}, 3, 1, False), ({"faithful": True}, 0, 3, False), ({}, 0, 3, True),
    ({"faithful": True, "param_as_bucket_view": False}, 0, 1, True),
], ids=["there", "there, accumulating", "ours, accumulating", "there, evaluating"])  # fmt: skip
def test_steps_over_edges_of_many_weights(
    options: dict[str, Any], average: int, passes: int, evaluates: bool
) -> None:
    expected = decent.simulated(7, average, "faithful" in options, topology=decent.Uneven, passes=passes)
    results = on_gpus(4, "gloo", decent.train, options, 7, average, False, decent.Uneven, passes, evaluates)
    for rank, (found, _, _) in enumerate(results):
        assert found == pytest.approx(expected[rank], abs=2e-6)


@pytest.mark.parametrize(("average", "at"), [(0, 1), (0, 5), (3, 5)])
def test_a_run_as_there_goes_on_with_the_same_bits(average: int, at: int) -> None:
    for found in on_gpus(4, "gloo", decent.resumed, average, at):
        assert found == {name: [0.0] * 5 for name in found} and found


@pytest.mark.parametrize(("n", "backend"), WAYS)
@pytest.mark.parametrize("kind", ["cnn", "gpt2"])
def test_the_experiments_of_decent_dp(n: int, backend: str, kind: str) -> None:
    check(on_gpus(n, backend, work_scripts.decent, kind))


@pytest.mark.parametrize(("n", "backend"), WAYS)
@pytest.mark.parametrize("name", ["EASGD+", "LSGD"])
def test_the_main_loop_of_sdtl(n: int, backend: str, name: str) -> None:
    check(on_gpus(n, backend, work_scripts.sdtl, name))


def test_methods_of_sdtl_as_there() -> None:
    """Also from a state that was saved."""
    for rank, found in enumerate(on_gpus(3, "gloo", work_sdtl.train)):
        for name, (whole, resumed) in found.items():
            assert whole == pytest.approx(work_sdtl.expected(name)[rank], abs=1e-5) and resumed == whole
