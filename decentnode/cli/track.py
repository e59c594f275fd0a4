"""`decentnode track`: sends a recorded run, or one in progress, to a tracker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pydantic

from decentnode import clock
from decentnode.cli.run_names import run_names
from decentnode.errors import DecentnodeError, EnvironmentFault, UsageError, describe_error

POLL_SECONDS = 1.0


@click.command()
@click.argument("run", metavar="RUN", shell_complete=run_names)
@click.option("--to", "tracker", required=True, metavar="TRACKER",
              help="Name from `decentnode list tracker`, or a section: '{name: wandb, mode: offline}'.")  # fmt: skip
@click.option("--follow", "-f", is_flag=True, help="Continue until the run is over, or Ctrl-C.")
def command(run: str, tracker: str, follow: bool) -> None:
    """Send everything that RUN has recorded to a tracker, as `run.trackers` does during a run.

    RUN is a run directory, the folder of an experiment (its latest run) or latest. If a tracker failed or was
    unavailable during a run, nothing is lost: the figures are in the run's folder.
    """
    from decentnode.config.component import add_module_folder
    from decentnode.launch.files.run_dir import resolve
    from decentnode.trackers.process import Feed, TrackerGivenUp, make, opened

    path = resolve(run)
    add_module_folder(Path.cwd())
    section, tracked = _section(tracker), opened(path)
    try:
        connected = make(section, tracked)
    except DecentnodeError:
        raise
    except pydantic.ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise UsageError(f"--to {section['name']}: {problems}") from error
    except Exception as error:  # the tracker's library may raise anything
        raise EnvironmentFault(f"tracker {section['name']}: {describe_error(error)}") from error
    if connected.place:
        click.echo(connected.place)
    refused: list[str] = []
    feed = Feed(tracked, connected, refused.append)
    try:
        feed.poll()
        while follow and not (path / "summary.json").exists():
            clock.sleep(POLL_SECONDS)
            feed.poll()
        feed.finish()
    except KeyboardInterrupt:
        feed.finish()
    except TrackerGivenUp as error:
        raise EnvironmentFault(f"tracker {section['name']} {error}") from error
    if refused:
        missing = f"{feed.refused} of {feed.accepted + feed.refused} points are missing"
        raise EnvironmentFault(f"tracker {section['name']} {refused[0]}: {missing}")
    click.echo(f"{feed.accepted} points sent")


def _section(text: str) -> dict[str, Any]:
    """Returns a tracker's section, given as a name or as YAML. Raises UsageError."""
    import yaml

    try:
        section = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"--to must be a name or a section, got {text!r}") from error
    section = {"name": section} if isinstance(section, str) else section
    if not isinstance(section, dict) or not isinstance(section.get("name"), str):
        raise UsageError(f"--to must be a name or a section with a name, got {json.dumps(section)}")
    return section
