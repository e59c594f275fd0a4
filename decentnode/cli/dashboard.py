"""`decentnode dashboard`: shows runs, in progress or finished, in a browser."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--port", type=click.IntRange(0, 65535),
              help="Port to listen on. Default: 8765, or any free port if that is taken. 0: any free "
                   "port.")  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True,
              help="Address to listen on. Any address but this machine's own exposes the page to the "
                   "network.")  # fmt: skip
@click.option("--run-dir", type=click.Path(path_type=Path), default=Path("runs"), show_default=True,
              help="Folder of all runs; the page lists them.")  # fmt: skip
@click.option("--open", "opens", is_flag=True, help="Open the page in a browser.")
def command(runs: tuple[str, ...], port: int | None, host: str, run_dir: Path, opens: bool) -> None:
    """Show RUN in a browser, live or replayed: the graph, which node waits for which, curves, events and machines. The
    page can also pause, resume, stop and evaluate the run. Ctrl-C ends the page, not the run.

    RUN is a run directory, the folder of an experiment or its name (its latest run), or latest. Default: the newest
    run. Anyone who knows the printed address, which contains a token, can see and control the runs.
    """
    import sys

    from decentnode.dashboard.serve import check_installed, is_loopback, listen, new_token, serve, url
    from decentnode.launch.files.run_dir import resolve

    check_installed()
    paths = [resolve(run, run_dir) for run in runs]
    if not paths and not run_dir.is_dir():
        raise click.UsageError(f"no runs in {run_dir}: give a RUN, or the folder of all runs with --run-dir")
    listening = listen(host, port)
    if not is_loopback(host):
        click.echo(f"warning: port {listening.getsockname()[1]} is open to the network: anyone who can reach it and "
                   "has the token can see and stop these runs, and nothing is encrypted. Without --host, only this "
                   "machine can open the page; use ssh -L to reach it from elsewhere.", err=True)  # fmt: skip
    token = new_token()
    address = url(listening, host, token)
    click.echo(address)
    sys.stdout.flush()
    if opens:
        import webbrowser

        webbrowser.open(address)
    serve(listening, paths, list(dict.fromkeys([*(path.parent.parent for path in paths), run_dir])), token, host)
