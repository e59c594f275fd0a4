"""Pictures of the dashboard, made by a real browser: `docs/screenshots.sh` calls it with runs. The first is shown
alone, light and dark, the first two side by side."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PICTURES = Path(__file__).parent / "pictures"
WIDE = {"width": 1360, "height": 840}
COLORS = 160
"""Of a picture: few enough for a small file."""
SETTLE_MS = 2500
"""How long nodes may take to find their places."""


def views(first: str, both: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, view in the address, options of the browser."""
    yield "dashboard", f"&runs={first}&edge=latency&round=40", {"viewport": WIDE}
    yield "dashboard_dark", f"&runs={first}&color=wait&edge=latency&axis=seconds&tab=events&node=3&round=22", {
        "viewport": WIDE, "color_scheme": "dark"}  # fmt: skip
    yield "dashboard_runs", f"&runs={both}&color=loss&axis=bytes&tab=nodes", {"viewport": WIDE}


def main(runs: list[str]) -> None:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    paths = [Path(run).resolve() for run in runs]
    paths = [(path / "latest").resolve() if (path / "latest").exists() else path for path in paths]
    ids = [f"{path.parent.name}/{path.name}" for path in paths]
    command = [sys.executable, "-m", "decentnode", "dashboard", *map(str, paths), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as dashboard, sync_playwright() as playwright:
        assert dashboard.stdout is not None
        address = dashboard.stdout.readline().strip()
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, view, options in views(ids[0], ",".join(ids[:2])):
            page = browser.new_context(**options).new_page()
            page.goto(address + view)
            page.wait_for_selector("canvas[data-nodes]")
            page.wait_for_timeout(SETTLE_MS)
            page.screenshot(path=PICTURES / f"{name}.png")
            page.context.close()
            shrink(PICTURES / f"{name}.png")
        browser.close()
        dashboard.terminate()


def shrink(path: Path) -> None:
    """Give a picture few colors."""
    from PIL import Image

    with Image.open(path) as image:
        few = image.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1:])
