"""Make docs/screenshots/ again: every view of the studio in light and dark, the figures of the documentation's pages,
and the animation of the README."""

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
FIGURES = {
    "product": "tokens?_only=product",
    "column-and-row": "tokens?_only=holds",
    "one-clock": "tokens?_only=clock&_clock=40",
    "training-flips": "tokens?_only=flip&_tokens=13",
    "zero-bytes": "tokens?_only=zero",
    "zero-stages": "memory?model=llama-3-8b&zero=1&_only=fits",
    "device-bytes": "memory?model=llama-3-8b&zero=1&_only=devices",
    "recompute": "memory?model=llama-3-8b&zero=1&recompute=full&_only=moments",
    "step-memory": "memory?model=llama-3-8b&zero=1&_only=moments",
    "offload": "memory?model=llama-3-8b&zero=3&offload=cpu&offload_params=cpu&_only=devices,homes",
    "sequence": "memory?model=llama-3-8b&cp=8&_only=sequence",
    "schedules": "pipelines?a=1f1b&b=zb-h1&micro=8&_only=a,b",
    "gpipe": "pipelines?a=gpipe&b=1f1b&micro=8&_only=a,b",
    "bubble": "pipelines?a=1f1b&b=zb-h1&micro=8&_only=curve",
    "routed": "experts?_only=routed&_step=4&load=skewed",
    "spread-experts": "experts?_only=exchanged",
    "ring-of-four": "collectives?ranks=4&_round=3&_only=rounds",
    "algorithms": "collectives?ranks=16&_only=sizes",
    "hierarchy": "collectives?collective=all-gather&algorithm=hierarchical&ranks=8&node=4&_round=2&_only=rounds",
    "stale": "sync?sync=ssp&slow=1&steps=16&_only=gradients",
    "ways-to-agree": "sync?slow=1&_only=compared",
    "incast": "sync?slow=1&_only=incast",
    "local": "sync?sync=local&slow=1&steps=16&_only=gradients",
    "growth": "plan?model=llama-3-70b&cluster=8x8xH100&batch=512&_only=growth",
    "step-time": "plan?model=llama-3-8b&cluster=8xH100&seq=4096&batch=64&_only=parts",
    "scoreboard": "plan?_only=scoreboard",
}
"""Picture of one figure -> its state; pages show the picture, and the documentation's site the figure itself."""
FIGURE_WIDTH, WINDOW = 688, {"width": 1280, "height": 860}
TOP = {"pipelines": "a", "sync": "gradients"}
"""Picture -> the figure that it begins with, where that is not the head of the page."""
LIGHT = ("tokens-inside", "tokens-answer", "tokens-training", "experts", "sync", *FIGURES)
"""Pictures for pages of the documentation, in light alone."""

ANIMATED = "ring.gif", "collectives?ranks=6&_round={}", 11
"""File, the state of one frame, and frames: an all-reduce over six ranks."""
FRAME_MS, LAST_MS = 700, 2500


def animate(page: Any, address: str, folder: Path) -> None:
    """Write the frames as one GIF, below 1 MB. page: of playwright."""
    from PIL import Image

    name, state, count = ANIMATED
    frames = []
    page.set_viewport_size(WINDOW)
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
    parser.add_argument("--only", nargs="*", choices=SHOWN | FIGURES, default=[*SHOWN, *FIGURES], metavar="PICTURE")
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
    shown = SHOWN | FIGURES
    with studio, sync_playwright() as playwright:
        threading.Thread(target=studio.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        for theme in ("light", "dark"):
            context = browser.new_context(viewport=WINDOW, color_scheme=theme, reduced_motion="reduce")
            page = context.new_page()
            for view in (name for name in args.only if theme == "light" or name not in LIGHT):
                page.set_viewport_size({"width": FIGURE_WIDTH, "height": 100} if view in FIGURES else WINDOW)
                page.goto("about:blank")
                page.goto(f"{studio.address}#{shown[view]}")
                page.wait_for_selector("body[data-ready]", timeout=60_000)
                if view in TOP:
                    place = f"document.querySelector('[data-figure={TOP[view]}]').getBoundingClientRect().top"
                    page.evaluate(f"scrollBy(0, {place} - 70)")
                    page.wait_for_timeout(100)
                path = args.out / f"{view}-{theme}.png"
                page.screenshot(path=path, full_page=view in FIGURES)
                print(f"wrote {path}")
            if theme == "light" and set(SHOWN) <= set(args.only):
                animate(page, studio.address, args.out)
            context.close()
        browser.close()
        studio.shutdown()


if __name__ == "__main__":
    main()
