"""Make docs/screenshots/ again: every view of the studio, in light and dark, and the animation of the README."""

from __future__ import annotations

import argparse
import io
import threading
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.studio.server import Studio

FOLDER = Path(__file__).parent / "screenshots"
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
SHOWN = {
    "tokens": "tokens",
    "tokens-inside": "tokens?_chapter=4&_clock=40",
    "tokens-answer": "tokens?_chapter=6&_token=100",
    "tokens-training": "tokens?_chapter=7&_tokens=13",
    "experts": "experts?_chapter=2&_step=4&load=skewed",
    "memory": "memory?zero=1",
    "collectives": "collectives?ranks=6&_round=3",
    "pipelines": "pipelines?a=1f1b&b=zb-v&micro=12&_time=24",
    "plan": "plan",
    "sync": "sync?slow=1&steps=16",
    "runs": "runs",
}
"""Picture -> the state that is shown."""
TOP = {"pipelines": "a", "sync": "gradients"}
"""Picture -> the figure that it begins with, where that is not the head of the page."""
LIGHT = ("tokens-inside", "tokens-answer", "tokens-training", "experts", "sync")
"""Pictures for docs/explanations.md and docs/studio.md, in light alone."""

ANIMATED = "ring.gif", "collectives?ranks=6&_round={}", 11
"""File, the state of one frame, and frames: an all-reduce over six ranks."""
FRAME_MS, LAST_MS = 700, 2500


def animate(page: Any, address: str, folder: Path) -> None:
    """Write the frames as one GIF, below 1 MB. page: of playwright."""
    from PIL import Image

    name, state, count = ANIMATED
    frames = []
    for number in range(count):
        page.goto("about:blank")
        page.goto(f"{address}#{state.format(number)}")
        page.wait_for_selector("body[data-ready]", timeout=60_000)
        page.wait_for_timeout(200)
        shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        frames.append(shot.resize((shot.width * 3 // 4, shot.height * 3 // 4)).quantize(64))
    times = [FRAME_MS] * (count - 1) + [LAST_MS]
    frames[0].save(folder / name, save_all=True, append_images=frames[1:], duration=times, loop=0, optimize=True)
    print(f"wrote {folder / name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="a folder with a run, such as demo leaves")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--only", nargs="*", choices=SHOWN, default=list(SHOWN), metavar="PICTURE")
    args = parser.parse_args()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise SystemExit("playwright is missing: pip install 'shardwise[test]'") from None
    if not CHROMIUM.exists():
        install = "apt-get install -y --no-install-recommends chromium fonts-dejavu-core"
        raise SystemExit(f"{CHROMIUM} is missing: {install}")
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        studio = Studio(0, args.runs)
    except UserError as error:
        raise SystemExit(str(error)) from None
    with studio, sync_playwright() as playwright:
        threading.Thread(target=studio.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        for theme in ("light", "dark"):
            context = browser.new_context(
                viewport={"width": 1280, "height": 860}, color_scheme=theme, reduced_motion="reduce"
            )
            page = context.new_page()
            for view in (name for name in args.only if theme == "light" or name not in LIGHT):
                page.goto("about:blank")
                page.goto(f"{studio.address}#{SHOWN[view]}")
                page.wait_for_selector("body[data-ready]", timeout=60_000)
                if view in TOP:
                    place = f"document.querySelector('[data-figure={TOP[view]}]').getBoundingClientRect().top"
                    page.evaluate(f"scrollBy(0, {place} - 70)")
                    page.wait_for_timeout(100)
                path = args.out / f"{view}-{theme}.png"
                page.screenshot(path=path)
                print(f"wrote {path}")
            if theme == "light":
                animate(page, studio.address, args.out)
            context.close()
        browser.close()
        studio.shutdown()


if __name__ == "__main__":
    main()
