"""The HTML report in a real headless Chromium: it draws, sorts, switches colours and asks the network for nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.unit.tools.ckpt_analysis.render.html.report_pages import page_of
from tests.unit.tools.ckpt_analysis.trace_factory import Options, write_trace
from tests.unit.tools.ckpt_replay.replay_helpers import figures, samples
from tools.ckpt_analysis.cli import main
from tools.ckpt_analysis.render.html.figures import FIGURES

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)

PATIENCE_MS = 300_000  # a slow machine draws the same

# Each lays the whole page out anew, in two to three seconds of a processor. The other colours move nothing: they are
# looked at where there is least room, on the page of a comparison, which is small.
WIDTHS = (1400, 800)
Colours = Literal["light", "dark"]
VIEWS: tuple[tuple[int, Colours], ...] = (*((width, "light") for width in WIDTHS), (WIDTHS[-1], "dark"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium here: install it with `apt-get install -y chromium` (Debian's package)"
    ),
]


TEXTS_OUTSIDE = """() => Array.from(document.querySelectorAll('.plot')).flatMap(plot => {
    const room = plot.getBoundingClientRect();
    return Array.from(plot.querySelectorAll('.main-svg text')).filter(text => {
        const box = text.getBoundingClientRect();
        return box.width > 0 && (box.left < room.left - 1 || box.right > room.right + 1
            || box.bottom > room.bottom + 1 || box.top < room.top - 1);
    }).map(text => plot.id + ': ' + text.textContent);
})"""


LEGENDS_OVER_PLOTS = """() => Array.from(document.querySelectorAll('.plot')).filter(plot => {
    const legend = plot.querySelector('.legend .bg');
    if (!legend) return false;
    const box = legend.getBoundingClientRect();
    return Array.from(plot.querySelectorAll('.nsewdrag')).some(area => {
        const room = area.getBoundingClientRect();
        return box.width > 0 && box.bottom > room.top + 2 && box.top < room.bottom - 2;
    });
}).map(plot => plot.id)"""


TICKS_OVER_TICKS = """() => Array.from(document.querySelectorAll('.plot')).flatMap(plot =>
    ['.xtick text', '.ytick text'].flatMap(kind => {
        const boxes = Array.from(plot.querySelectorAll(kind), text => text.getBoundingClientRect());
        return boxes.some((one, i) => boxes.slice(i + 1).some(other =>
            one.left < other.right - 1 && other.left < one.right - 1
            && one.top < other.bottom - 1 && other.top < one.bottom - 1)) ? [plot.id + ' ' + kind] : [];
    }))"""


TEXTS_ON_LINES = """() => Array.from(document.querySelectorAll('.plot .trace.scatter')).flatMap(trace => {
    const bars = Array.from(trace.querySelectorAll('.yerror'), bar => bar.getBoundingClientRect());
    return Array.from(trace.querySelectorAll('.textpoint')).filter(text => {
        const box = text.getBoundingClientRect();
        return bars.some(bar => bar.left < box.right && box.left < bar.right
            && bar.top < box.bottom && box.top < bar.bottom);
    }).map(text => text.textContent);
})"""


WIDER_THAN_THE_PAGE = """() => Array.from(document.querySelectorAll('.table-scroll'))
    .filter(one => one.scrollWidth > one.clientWidth + 1 && !one.closest('details:not([open])'))
    .map(one => one.getAttribute('aria-label') + ': ' + one.scrollWidth)"""


@dataclass
class Watched:
    """A page in the browser, and all that it said or asked for since it was opened."""

    page: Any
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def open(self, path: Path) -> None:
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", lambda message: self.console.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.console.append(f"error: {error}"))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_function("document.documentElement.dataset.drawn === 'all'")

    def assert_quiet(self, path: Path) -> None:
        """Nothing was said, and nothing asked for but the file itself and what it holds."""
        assert self.console == []
        outside = [url for url in self.requests if not url.startswith(("data:", "blob:"))]
        assert outside == [path.as_uri()]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is in the extra dev")
    with sync_api.sync_playwright() as playwright:
        # As root, and in containers, Chromium cannot make the sandbox that it keeps pages of the web in.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        running = playwright.chromium.launch(
            executable_path=CHROMIUM, args=[*arguments, "--disable-gpu"], timeout=PATIENCE_MS
        )
        yield running
        running.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report")
    path = directory / "ckpt_report.html"
    path.write_text(page_of(write_trace(directory / "trace", Options(hosts=2))))
    return path


def watched(browser: Any, report: Path) -> Iterator[Watched]:
    """The report, drawn anew: three seconds of a processor."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    watched = Watched(page)
    watched.open(report)
    yield watched
    page.close()


# For all tests that leave its colours and size as they are, or put them back; for those that leave folded what is; for
# one test.
opened = pytest.fixture(scope="module")(watched)
folded = pytest.fixture(scope="module")(watched)
fresh = pytest.fixture(watched)


def test_draws_every_figure_without_a_word_or_a_request(opened: Watched, report: Path) -> None:
    """What is folded is drawn once it is opened."""
    folded = opened.page.locator("details.small:not([open]) .plot")
    assert folded.count() > 3 and folded.locator(".main-svg").count() == 0
    opened.page.evaluate("for (const part of document.querySelectorAll('details.small')) part.open = true")
    opened.page.wait_for_function(
        "Array.from(document.querySelectorAll('.plot')).every(plot => plot.querySelector('.main-svg .infolayer'))"
    )
    for figure in FIGURES:
        if figure.name == "probes":  # not recorded in this trace: a sentence
            continue
        drawn = opened.page.locator(f"#{figure.name} .plot")
        assert drawn.count() > 0
        for index in range(drawn.count()):
            box = drawn.nth(index).locator(".main-svg").first.bounding_box()
            assert box and box["width"] > 400 and box["height"] > 150
            marks = drawn.nth(index).locator(".point, .heatmaplayer image, .lines path, .textpoint")
            marks.first.wait_for(state="attached")  # they come after the layers
    opened.assert_quiet(report)


def test_the_picture_and_the_four_numbers_are_seen_first(folded: Watched) -> None:
    for width in WIDTHS:
        folded.page.set_viewport_size({"width": width, "height": 900})
        folded.page.evaluate("window.scrollTo(0, 0)")
        for part in ("#summary .numbers", "#summary .budget", "#summary #restart .plot", "#summary .answer"):
            box = folded.page.locator(part).bounding_box()
            assert box and box["y"] > 0 and box["y"] + box["height"] < 900, (part, width)
        for part in folded.page.locator("#summary .budget span").all():
            assert part.evaluate("part => part.scrollWidth <= part.clientWidth"), (part.inner_text(), width)
        assert not folded.page.locator("#summary .facts").is_visible()
        assert folded.page.locator(".modebar").count() == 0  # buttons stand above the figures, and cover nothing
        folded.page.locator("#barriers").scroll_into_view_if_needed()
        contents = folded.page.locator("nav").bounding_box()
        assert contents and contents["y"] == 0 and contents["height"] < 60, width


def test_a_link_opens_what_is_folded(folded: Watched) -> None:
    folded.page.evaluate("window.unfolded = Array.from(document.querySelectorAll('details[open]'))")
    assert folded.page.locator("#steps details[open]").count() == 0
    folded.page.locator("nav a[href='#steps']").click()
    folded.page.wait_for_function("document.querySelector('#steps .plot .main-svg') !== null")
    folded.page.locator("nav a[href='#ranks']").click()  # of which a part is folded by itself
    folded.page.wait_for_function("document.querySelector('#ranks .plot .main-svg') !== null")
    assert folded.page.locator("#ranks details.whole details.small:not([open])").count() == 1
    assert not folded.page.locator("#definitions dt").first.is_visible()
    folded.page.evaluate("location.hash = document.querySelector('#definitions dt').id")
    folded.page.wait_for_function("document.querySelector('#definitions details').open")
    folded.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = window.unfolded.includes(d))")


def test_what_answers_no_question_of_the_first_screen_is_folded_to_its_result(folded: Watched) -> None:
    """The page of a run is read to its end; each of its figures still says what it shows."""
    folded.page.set_viewport_size({"width": 1400, "height": 900})
    names = [figure.name for figure in FIGURES if figure.folded and figure.name != "probes"]  # none in this trace
    for name in names:
        assert not folded.page.locator(f"#{name} .plot").first.is_visible()
        assert folded.page.locator(f"#{name} summary").first.inner_text().endswith(".")
    assert folded.page.evaluate("document.documentElement.scrollHeight") < 6000


def test_zoom_is_undone_by_a_button(opened: Watched) -> None:
    ranges = "JSON.stringify(document.getElementById('plot-waterfall-0').layout.xaxis.range)"
    before = opened.page.evaluate(ranges)
    opened.page.evaluate("Plotly.relayout('plot-waterfall-0', {'xaxis.range': [0.01, 0.02]})")
    assert opened.page.evaluate(ranges) == "[0.01,0.02]"
    opened.page.locator("button.reset[data-plot='plot-waterfall-0']").click()
    opened.page.wait_for_function(f"{ranges} === {before!r}")
    with opened.page.expect_download() as saved:
        opened.page.locator("button.image[data-plot='plot-waterfall-0']").click()
    assert saved.value.suggested_filename == "plot-waterfall-0.png"


def test_every_text_of_a_plot_lies_within_it(opened: Watched) -> None:
    """Labels that are cut off would be missing in print, too."""
    assert opened.page.evaluate(TEXTS_OUTSIDE) == []


def column(opened: Watched, table: int, number: int) -> list[str]:
    return (
        opened.page.locator("table.sortable").nth(table).locator(f"tbody tr > :nth-child({number})").all_inner_texts()
    )


def test_tables_sort_by_mouse_and_keyboard(opened: Watched) -> None:
    opened.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    tables = opened.page.locator("table.sortable")
    captions = tables.locator("caption").all_inner_texts()
    index = next(i for i, text in enumerate(captions) if text.startswith("Save global_step10, cycle 1, phase by phase"))
    header = tables.nth(index).locator("thead th").nth(1)
    header.locator("button").click()
    numbers = [float(text) for text in column(opened, index, 2)]
    assert numbers == sorted(numbers) and len(set(numbers)) > 3
    assert header.get_attribute("aria-sort") == "ascending"
    header.locator("button").press("Enter")
    assert [float(text) for text in column(opened, index, 2)] == sorted(numbers, reverse=True)
    assert header.get_attribute("aria-sort") == "descending"
    tables.nth(index).locator("thead th").first.locator("button").click()
    names = column(opened, index, 1)
    assert names == sorted(names) and header.get_attribute("aria-sort") is None
    bytes_header = tables.nth(index).locator("thead th").nth(7)
    bytes_header.locator("button").click()
    assert column(opened, index, 8)[-1] in ("", "-")  # what is not known comes last


def test_no_table_is_wider_than_the_page(fresh: Watched) -> None:
    """Without the plots, which would be drawn at each width; a page that these make wider has room for any table."""
    fresh.page.evaluate("document.querySelectorAll('.plot').forEach(one => { one.remove(); })")
    fresh.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    for width in (1000, *WIDTHS):
        fresh.page.set_viewport_size({"width": width, "height": 900})
        assert fresh.page.locator(".table-scroll table").last.is_visible()
        assert fresh.page.evaluate(WIDER_THAN_THE_PAGE) == [], width


def background(opened: Watched) -> str:
    return opened.page.evaluate("getComputedStyle(document.body).backgroundColor")


def ink_of_axis(opened: Watched) -> str:
    return opened.page.evaluate("getComputedStyle(document.querySelector('#plot-waterfall-0 .xtick text')).fill")


def test_each_row_of_the_map_of_ranks_lies_beside_its_name(opened: Watched) -> None:
    plot = opened.page.locator("#plot-ranks-0")
    centres = [
        sorted(box["y"] + box["height"] / 2 for one in plot.locator(what).all() if (box := one.bounding_box()))
        for what in (".heatmaplayer image", ".ytick text")
    ]
    assert len(centres[0]) == len(centres[1]) > 5
    assert all(abs(row - name) < 4 for row, name in zip(*centres, strict=True))


def test_ranks_can_be_arranged_otherwise(opened: Watched) -> None:
    assert opened.page.locator("#plot-ranks-0 .point").count() == 1  # the mark of the straggler, rank 5
    group = opened.page.get_by_role("group", name="Arrangement of Save global_step10, cycle 1: 8 ranks")
    other = group.get_by_role("button", name="by TP × PP × DP")
    other.click()
    opened.page.wait_for_function("document.getElementById('plot-ranks-0').layout.xaxis.title.text.includes('stage')")
    assert other.get_attribute("aria-pressed") == "true"


def resize(page: Any, width: int) -> None:
    """Return when all is drawn for a window of this width: `drawn` tells of the one before at first, and the page may
    be through with this one before this process looks."""
    if page.viewport_size["width"] != width:
        page.evaluate("delete document.documentElement.dataset.drawn")
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function("document.documentElement.dataset.drawn === 'all'")


def test_no_legend_covers_a_plot_after_the_window_was_resized(opened: Watched) -> None:
    opened.page.evaluate("for (const part of document.querySelectorAll('details.small')) part.open = true")
    for width in (800, 500, 1280):  # the last as it was
        resize(opened.page, width)
        assert opened.page.evaluate(LEGENDS_OVER_PLOTS) == [], width
        if width == 500:
            assert opened.page.evaluate(TICKS_OVER_TICKS) == []
            assert opened.page.locator("#plot-ranks-0 .heatmap-label").count() == 0, "cells without room have no value"


def test_keyboard_colours_sizes_and_print(fresh: Watched, report: Path, tmp_path: Path) -> None:
    fresh.page.keyboard.press("Tab")
    assert fresh.page.evaluate("document.activeElement.className") == "skip"
    assert (background(fresh), ink_of_axis(fresh)) == ("rgb(255, 255, 255)", "rgb(27, 31, 36)")
    fresh.page.emulate_media(color_scheme="dark")
    fresh.page.wait_for_function(
        "getComputedStyle(document.querySelector('#plot-waterfall-0 .xtick text')).fill === 'rgb(230, 233, 237)'"
    )
    assert background(fresh) == "rgb(20, 24, 29)"
    fresh.page.get_by_role("button", name="Switch to light colours").click()
    fresh.page.wait_for_function(
        "getComputedStyle(document.querySelector('#plot-waterfall-0 .xtick text')).fill === 'rgb(27, 31, 36)'"
    )
    assert background(fresh) == "rgb(255, 255, 255)"

    for width in (1280, 480):
        fresh.page.set_viewport_size({"width": width, "height": 900})
        fresh.page.wait_for_function("document.documentElement.scrollWidth <= document.documentElement.clientWidth")

    fresh.page.emulate_media(color_scheme="dark")
    fresh.page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    widths = "Array.from(document.querySelectorAll('.plot .main-svg'), (svg) => svg.getBoundingClientRect().width)"
    fresh.page.wait_for_function(f"Math.max(...{widths}) <= 680")  # of the paper
    fresh.page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    printed = fresh.page.pdf(path=str(tmp_path / "report.pdf"), print_background=True)
    assert printed.startswith(b"%PDF") and len(printed) > 50_000
    fresh.assert_quiet(report)


def test_hostile_names_run_nothing(browser: Any, tmp_path: Path) -> None:
    hostile = "<script>window.bad=1</script><img src=x onerror=window.bad=2>"
    write_trace(tmp_path / "trace", Options(run_id=hostile))
    for path in (tmp_path / "trace").glob("rank_*"):
        path.write_text(path.read_text().replace("node0", hostile).replace("MainThread", hostile))
    path = tmp_path / "page.html"
    path.write_text(page_of(tmp_path / "trace"))
    page = browser.new_page()
    watched = Watched(page)
    watched.open(path)
    assert page.evaluate("window.bad") is None
    assert hostile in page.locator("h1").inner_text()
    watched.assert_quiet(path)
    page.close()


def test_comparison_draws(browser: Any, tmp_path: Path) -> None:
    first = write_trace(tmp_path / "blocking")
    second = write_trace(tmp_path / "background", Options(background_flush=True))
    path = tmp_path / "page.html"
    assert main(["--quiet", str(first), str(second), "-o", str(path)]) == 0
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    watched = Watched(page)
    watched.open(path)
    assert page.locator("#comparison .plot .point").count() > 6
    for width, colours in VIEWS:  # the verdict and the four numbers are seen first
        page.emulate_media(color_scheme=colours)
        resize(page, width)
        numbers = page.locator("#numbers").bounding_box()
        verdict = page.locator("#summary > .answer").bounding_box()
        assert verdict and numbers and 0 < verdict["y"] < numbers["y"] and numbers["y"] + numbers["height"] < 900
        assert page.locator("#numbers thead th").count() == 6 and page.locator("#numbers tbody tr").count() == 2
        for wrong in (TEXTS_OUTSIDE, TICKS_OVER_TICKS, TEXTS_ON_LINES, WIDER_THAN_THE_PAGE):
            assert page.evaluate(wrong) == [], (width, colours)
    watched.assert_quiet(path)
    page.close()


def test_engines_by_storage_have_room_for_many_storages(browser: Any, tmp_path: Path) -> None:
    places = [f"/lustre/{name}/checkpoints" for name in ("scratch", "project", "home", "burst", "nvme0", "nvme1")]
    replays = [tmp_path / f"{index}.json" for index in range(len(places))]
    for place, path in zip(places, replays, strict=True):
        path.write_text(json.dumps(figures(samples(1.0)) | {"directory": place}))
    path = tmp_path / "page.html"
    assert main(["compare", "--quiet", *map(str, replays), "-o", str(path)]) == 0
    for width in (1400, 800):
        page = browser.new_page(viewport={"width": width, "height": 900})
        watched = Watched(page)
        watched.open(path)
        assert page.evaluate(TICKS_OVER_TICKS) == []
        labels = page.locator("#comparison .plot .ytick text").all_text_contents()
        assert all(any(f", {place}" in label for label in labels) for place in places), labels
        assert page.evaluate(TEXTS_OUTSIDE) == []
        page.close()
