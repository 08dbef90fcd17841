"""report.html: self-contained, small, and drawn in a real browser without an error or a request.

Screenshots are kept in the directory that $CI_ARTIFACTS names, where it is set, else in pytest's own.
"""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import vl_convert

from dlrm_autoshard.commands.main import main
from dlrm_autoshard.records.interval import epochs_file
from dlrm_autoshard.records.jsonl import append_jsonl
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.report import html
from dlrm_autoshard.report.charts import charts
from dlrm_autoshard.report.comparison import plans_side_by_side
from dlrm_autoshard.report.html import render_comparison, render_html, write_html
from dlrm_autoshard.report.page_data import map_rows, page_data
from dlrm_autoshard.report.page_sections import page_sections
from tests.chromium import needs_chromium, open_page, print_to_pdf, take_screenshot
from tests.report_records import write_run

CHARTS = ("speed", "map", "costliest", "ranks", "memory", "logloss", "auc")
FOLDED = ("step-time", "predictions", "errors")


def marks_of(dom: str, chart: str) -> int:
    """Marks that were drawn in the SVG of one chart: bars, points, lines, texts; axes and legends don't count."""
    place = dom.split(f'id="chart-{chart}"')[1].split("</figure>")[0]
    groups = re.findall(r'<g class="mark-\w+ role-mark[^"]*"[^>]*>(.*?)</g>', place, re.S)
    return sum(len(re.findall(r"<(?:path|text|line|rect)\b", group)) for group in groups)


def when_drawn(page: str, script: str) -> str:
    """The page with a script that runs once its charts are there."""
    before, after = page.rsplit("</body>", 1)
    return f"""{before}<script>const until = setInterval(() => {{
        if (!document.documentElement.dataset.drawn) return;
        clearInterval(until);
        {script}
      }}, 50);</script></body>{after}"""


def kept(tmp_path: Path, name: str) -> Path:
    place = Path(os.environ.get("CI_ARTIFACTS") or tmp_path)
    place.mkdir(parents=True, exist_ok=True)
    return place / name


def test_the_page_is_a_pure_function_of_the_record_and_asks_for_nothing(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path / "run"))
    page = render_html(record)
    assert page == render_html(record)
    own = page.split("<script>")[0]  # what comes after is the library, whose text names addresses it never asks for
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", own)
    assert "default-src 'none'" in own


def test_the_charts_library_is_bundled_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def make() -> str:
        made.append(1)
        return "draw() // \u00e9</script>"

    monkeypatch.setattr(vl_convert, "javascript_bundle", make)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bundle = html._bundle.__wrapped__
    assert bundle() == bundle() == "draw() // \u00e9<\\/script>" and len(made) == 1
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    assert bundle() == bundle() and len(made) == 3, "nowhere to keep it"


def test_names_of_runs_and_tables_cannot_break_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<b>&run", epochs=1, tables=3)
    lines = epochs_file(run).read_text()
    epochs_file(run).write_text(lines.replace("cat_0", "</script><script>alert(1)</script>"))
    page = render_html(RunRecord.load(run))
    assert "<title>&lt;b&gt;&amp;run" in page and "<script>alert(1)" not in page


def section(record: RunRecord, wanted: str) -> str:
    drawn = {chart.id for chart in charts(record)}
    return next(body for key, _, body in page_sections(record, drawn) if key == wanted)


def tiles(record: RunRecord) -> dict[str, str]:
    found = re.findall(r"<dt>(.*?)</dt><dd>(.*?) <small>(.*?)</small>", section(record, "summary"))
    return {title: f"{figure}: {note}" for title, figure, note in found}


def test_a_decision_is_a_row_with_what_is_known_of_it(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path / "run", epochs=2))
    whole, kept = record.decisions[-1], {"step": 9, "action": "kept", "text": "kept: so", "throughput_before": 3.0}
    of_move, of_kept = (section(replace(record, decisions=(one,)), "decisions") for one in (whole, kept))
    assert "paid back after 80 steps" in of_move and "measured 13.9% (11.2 to 16.6%)" in of_move
    assert of_move.count("14.8%") == 1, "a figure that the text has is not said again"
    assert "examples/s before 3" in of_kept and "measured 1" not in of_kept
    doubted = replace(record, decisions=({**whole, "doubt": "few steps"},))
    assert "measured not reliable" in section(doubted, "decisions") and "13.9%" not in section(doubted, "decisions")


def test_a_plan_that_is_kept_again_for_the_same_reason_is_one_row(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path / "run", epochs=2))
    kept = [{"step": step, "action": "kept", "text": "kept: so"} for step in (10, 20, 30)]
    body = section(replace(record, decisions=(*kept, {**kept[0], "step": 40, "text": "kept: else"})), "decisions")
    assert body.count("<li") == 2 and "10 to 30 (3 times)" in body


def test_tiles_say_speed_the_slowest_rank_what_is_left_and_what_moves_were_worth(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path / "run", ranks=2, epochs=1))
    found = tiles(record)
    assert found["Slowest rank"].startswith("rank 1: too much bwd_compute: ")
    assert re.fullmatch(r"\d+\.\d%: of a step by perfect balance \(\d+\.\d% to \d+\.\d%\)", found["Possible gain"])
    assert found["Gain from moves"] == "13.9%: of a step (11.2% to 16.6%), 1 move"
    assert "Perfect balance would save" in section(record, "summary").split('class="verdict"')[1][:60]
    even = RunRecord.load(write_run(tmp_path / "even", ranks=2, epochs=6))
    assert tiles(even)["Slowest rank"] == "none: no rank is significantly slower"
    assert tiles(even)["Gain from moves"].startswith("2 moves: saved 13.9% (11.2 to 16.6%), 13.9% (11.2 to 16.6%)")
    starved = RunRecord.load(write_run(tmp_path / "starved", ranks=2, epochs=6, starved_epoch=5))
    assert "no plan can change" in section(starved, "summary")


def test_the_map_has_each_table_on_its_rank_and_marks_where_it_moved(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path / "run", ranks=4, epochs=3, tables=40, drift=0.2))
    rows = [*map_rows(record)]
    moved = {name for name in rank_of(record, 0) if len({rank_of(record, at)[name] for at in range(3)}) > 1}
    assert moved and moved <= {row["name"] for row in rows} and len({row["name"] for row in rows}) == 32
    assert {row["name"] for row in rows if row["moved"]} == moved
    for row in rows:
        for at, profile in enumerate(record.intervals):
            if row["x0"] <= profile.first_step < row["x1"]:
                assert rank_of(record, at)[row["name"]] == row["rank"]


def rank_of(record: RunRecord, at: int) -> dict[str, int]:
    return {use.name: use.rank for use in record.intervals[at].tables}


def test_speed_is_drawn_by_step_where_metrics_have_it_and_smoothed(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path / "run", epochs=1))
    assert page_data(record)["speed"]["step"] == [0, 100]
    lines = [{"step": step, "split": "train", "examples_per_second": speed}
             for step, speed in ((10, 5.0), (20, 6.0), (30, 900.0), (40, 7.0))]  # fmt: skip
    speed = page_data(replace(record, metrics=tuple(lines)))["speed"]
    assert speed["examples"] == [5, 6, 900, 7] and max(speed["smooth"]) < 10


def test_the_speed_that_the_plan_before_a_move_would_have_had_is_drawn_until_the_next_change(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path / "run", epochs=6))
    speed, before = (page_data(record)[name] for name in ("speed", "before"))
    [first, second] = [d["step"] for d in record.decisions if d["action"] == "moved"]
    assert {*before["move"]} == {first, second} and min(before["step"]) == first
    after = next(s for step, s in zip(speed["step"], speed["smooth"], strict=True) if step > first)
    rows = [*zip(*(before[key] for key in ("move", "step", "low", "before", "high")), strict=True)]
    assert [step for move, step, *_ in rows if move == first] == [first, second]
    for _, _, low, middle, high in rows[:2]:
        assert low < middle < high < after and middle == pytest.approx(after * (1 - 0.139), rel=0.01)
    doubted = tuple({**decision, "doubt": "few steps"} for decision in record.decisions)
    assert page_data(replace(record, decisions=doubted))["before"] == {}


def test_two_runs_plans_are_side_by_side_those_that_differ_first(tmp_path: Path) -> None:
    one, other = (RunRecord.load(write_run(tmp_path / name, epochs=epochs)) for name, epochs in (("a", 1), ("b", 6)))
    rows = list(plans_side_by_side(one, other))
    differ = [a != b for _, a, b in rows]
    assert any(differ) and differ == sorted(differ, reverse=True) and len(rows) == 12
    for name, a, b in rows:
        assert (a, b) == (f"rank {rank_of(one, -1)[name]}", f"rank {rank_of(other, -1)[name]}")
    page = render_comparison(one, other)
    assert "Plans side by side" in page and f"{sum(differ)} of 12 tables are placed differently" in page


def test_the_verdict_says_what_a_user_can_use(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path / "run", ranks=2, epochs=1))
    looked = {"step": 300, "action": "kept", "text": "kept: looks have taken their share of the training time"}
    searched = {"step": 200, "action": "kept", "text": "kept: best candidate saves 1.2%", "predicted_gain": 0.012}
    for decisions, said in (
        ((looked,), "no plan with a significant gain was found."),
        ((searched, looked), "the best plan found at step 200 has a predicted gain of 1.2%, not enough to move."),
    ):
        found = section(replace(record, decisions=decisions), "summary")
        assert f"of a step; {said}" in found and "looks have taken" not in found.split("The run in")[0]


def test_memory_is_held_against_the_budget_that_the_plan_had(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=1)
    assert page_data(RunRecord.load(run))["ranks"]["budget_mib"] == [None, None]
    append_jsonl(run / "plan" / "evidence.jsonl", {"step": 0, "budget_bytes": [2**30, 2**31]})
    record = RunRecord.load(run)
    assert page_data(record)["ranks"]["budget_mib"] == [1024, 2048]
    assert "the budget for them" in section(record, "one-epoch")


@needs_chromium
def test_whole_numbers_are_shown_whole(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=1)
    rows = [f"{table.num_embeddings:,}" for table in RunRecord.load(run).last.tables]
    path = write_html(run, RunRecord.load(run))
    page = open_page(path, tmp_path)
    assert rows and all(f"<td>{count}</td>" in page.dom for count in rows)


def test_sixty_four_ranks_twenty_epochs_and_a_thousand_tables_stay_below_two_megabytes(tmp_path: Path) -> None:
    path = write_html(tmp_path, RunRecord.load(write_run(tmp_path / "run", ranks=64, epochs=20, tables=1000)))
    assert path.stat().st_size <= 2 * 2**20


def test_long_metrics_are_thinned_with_their_ends_kept(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=1)
    lines = [{"step": step, "epoch": 0, "split": "train", "logloss": 0.5} for step in range(200, 1400)]
    record = RunRecord(**{**vars(RunRecord.load(run)), "metrics": tuple(lines)})
    steps = page_data(record)["metrics"]["step"]
    assert len(steps) == 400 and (steps[0], steps[-1]) == (200, 1399)


def test_only_charts_with_something_to_show_are_drawn(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=1)  # its only epoch has no prediction
    (run / "decisions.jsonl").unlink()
    assert {chart.id for chart in charts(RunRecord.load(run))} == {*CHARTS, "step-time"}


@needs_chromium
@pytest.mark.parametrize(("ranks", "epochs", "tables"), [(4, 6, 30), (64, 20, 1000)])
def test_all_charts_are_drawn_without_an_error_or_a_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int, epochs: int, tables: int
) -> None:
    run = write_run(tmp_path / "run", ranks, epochs, tables, starved_epoch=2)
    assert main(["report", str(run), "--html"]) == 0
    path = Path(capsys.readouterr().out.strip())
    page = open_page(path, tmp_path)
    assert page.console == [] and page.requests == []
    assert f'data-drawn="{len(CHARTS)}"' in page.dom, "what is folded away is drawn when it is opened"
    unfolded = tmp_path / "unfolded.html"
    unfolded.write_text(
        when_drawn(path.read_text(), "for (const fold of document.querySelectorAll('details')) fold.open = true;")
    )
    page = open_page(unfolded, tmp_path)
    assert page.console == [] and page.requests == []
    drawn = {chart: marks_of(page.dom, chart) for chart in CHARTS + FOLDED}
    assert min(drawn.values()) > 0, drawn
    assert drawn["ranks"] >= 12 * ranks and drawn["map"] >= min(tables, 32)
    assert page.dom.count('role="img"') == len(CHARTS + FOLDED)  # each is one labelled picture to a screen reader
    picture = kept(tmp_path, f"report_{ranks}_ranks.png")
    take_screenshot(path, picture, tmp_path)
    assert picture.stat().st_size > 50_000


@needs_chromium
def test_the_epoch_control_changes_text_charts_and_tables(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path / "run", ranks=4, epochs=3, tables=30))
    choose_first = """
        const control = document.getElementById("epoch");
        control.value = "0";
        control.dispatchEvent(new Event("change"));"""
    shown, pages = {}, {}
    for name, text in (("last", render_html(record)), ("first", when_drawn(render_html(record), choose_first))):
        path = tmp_path / f"{name}.html"
        path.write_text(text)
        page = open_page(path, tmp_path)
        assert page.console == []
        pages[name] = page.dom
        text_of_epoch = page.dom.split('id="epoch-text"')[1].split("</p>")[0]
        bars = page.dom.split('id="chart-ranks"')[1].split("</figure>")[0]
        rows = page.dom.split('data-rows="ranks"')[1].split("</table>")[0]
        assert rows.count("<tr>") == 1 + 4
        shown[name] = (text_of_epoch, bars, rows)
    assert "In epoch 0" in shown["first"][0] and "Rank 3 makes the others wait" in shown["first"][0]
    assert "In epoch 2" in shown["last"][0]
    assert 'id="no-prediction" hidden' in pages["last"] and 'id="no-prediction">' in pages["first"]
    assert all(one != other for one, other in zip(*shown.values(), strict=True))


@needs_chromium
def test_a_phone_shows_the_whole_width(tmp_path: Path) -> None:
    """A frame of 320 px stands for the phone: Chromium's own window is not made that narrow."""
    page = render_html(RunRecord.load(write_run(tmp_path / "run", ranks=4, epochs=6, tables=30)))
    measure = """
        const wide = [...document.querySelectorAll(".chart svg")].map((svg) => svg.getBoundingClientRect().right);
        parent.postMessage([document.documentElement.scrollWidth, Math.max(...wide)], "*");"""
    (tmp_path / "inner.html").write_text(when_drawn(page, measure))
    (tmp_path / "outer.html").write_text(
        '<!doctype html><iframe src="inner.html" style="border:0;width:320px;height:6000px"></iframe><script>'
        'addEventListener("message", (said) => { document.body.dataset.widths = said.data.join(" "); });</script>'
    )
    dom = open_page(tmp_path / "outer.html", tmp_path).dom
    found = re.search(r'data-widths="([\d.]+) ([\d.]+)"', dom)
    assert found is not None
    assert float(found[1]) <= 320 and float(found[2]) <= 320


@needs_chromium
def test_it_prints(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ranks=4, epochs=6, tables=30)
    pdf = kept(tmp_path, "report.pdf")
    print_to_pdf(write_html(run, RunRecord.load(run)), pdf, tmp_path)
    pages = len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes()))
    assert 3 <= pages <= 8


@needs_chromium
def test_a_run_without_profiles_decisions_or_predictions_is_drawn(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("profile: {enabled: false}\n")
    for step in (10, 20):
        append_jsonl(tmp_path / "metrics.jsonl", {"step": step, "epoch": 0, "split": "train", "logloss": 1 / step})
    page = open_page(write_html(tmp_path, RunRecord.load(tmp_path)), tmp_path)
    assert page.console == [] and marks_of(page.dom, "logloss") > 0


@needs_chromium
def test_the_browser_test_would_see_a_request_and_an_error(tmp_path: Path) -> None:
    """The other tests lean on this: a page that does ask for something and does fail is caught."""
    bad = tmp_path / "bad.html"
    bad.write_text('<img src="http://127.0.0.1:9/x.png"><script>undefinedFunction()</script>')
    page = open_page(bad, tmp_path)
    assert page.requests == ["http://127.0.0.1:9/x.png"]
    assert any("undefinedFunction is not defined" in line for line in page.console)


def test_a_loop_of_ones_own_has_intervals(tmp_path: Path) -> None:
    """It knows no epochs: neither text nor a chart's tooltip speaks of them."""
    record = replace(RunRecord.load(write_run(tmp_path / "run", ranks=2, epochs=4)), config={})
    page = render_html(record)
    visible = re.sub(r"<script.*?</script>|<[^>]*>", " ", page[page.index("<body") :], flags=re.DOTALL)
    assert "nterval" in visible and "poch" not in visible
    titles = [title for chart in charts(record) for title in re.findall(r'"title": "(.*?)"', json.dumps(chart.spec))]
    assert "interval" in titles and "epoch" not in titles


@needs_chromium
def test_two_runs_share_one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [str(write_run(tmp_path / name, ranks=2, epochs=epochs)) for name, epochs in (("static", 2), ("moving", 4))]
    assert main(["report", *runs, "--html"]) == 0
    page = open_page(tmp_path / "static-and-moving.html", tmp_path)
    assert not page.console and not page.requests and 'data-drawn="1"' in page.dom
    assert "2 moves" in page.dom and "examples/s" in page.dom


def test_two_runs_of_different_models_are_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = (RunRecord.load(write_run(tmp_path / f"of{tables}", epochs=1, tables=tables)) for tables in (12, 14))
    said = "These runs train different models (&#x27;cat_12&#x27;, &#x27;cat_13&#x27; only in of14)"
    assert said in render_comparison(one, other) and "different models" not in render_comparison(one, one)
    assert main(["report", str(tmp_path / "of12"), str(tmp_path / "of14")]) == 0
    assert "different models" in capsys.readouterr().out


def test_two_runs_of_one_name_are_told_apart_by_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [str(write_run(Path(folder) / "run" / "mine", epochs=1)) for folder in "ab"]
    assert main(["report", *runs, "--html"]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page.name == "a-run-mine-and-b-run-mine.html"
    content = re.search(r'<script type="application/json" id="page">(.*?)</script>', page.read_text(), re.S)
    assert content and set(json.loads(content[1])["data"]["speed"]["run"]) == {"a/run/mine", "b/run/mine"}
    assert main(["report", *runs, "--csv"]) == 0
    assert {row.split(",")[0] for row in capsys.readouterr().out.splitlines()[1:]} == {"a/run/mine", "b/run/mine"}
    assert main(["report", runs[0], runs[0]]) == 0, "one run beside itself has one name"


@needs_chromium
def test_pictures_of_the_page_at_both_widths_and_in_both_schemes(tmp_path: Path) -> None:
    """Written to build/, which git ignores, to be looked at."""
    pictures = Path(__file__).parents[1] / "build" / "report"
    pictures.mkdir(parents=True, exist_ok=True)
    run = write_run(tmp_path / "run", ranks=4, epochs=6, starved_epoch=2)
    path = write_html(run, RunRecord.load(run))
    sizes = []
    for width, height in ((1280, 1400), (400, 1600)):
        for scheme, flags in (("light", ()), ("dark", ("--blink-settings=preferredColorScheme=0",))):
            picture = pictures / f"{width}-{scheme}.png"
            take_screenshot(path, picture, tmp_path, width, height, *flags)
            sizes.append(picture.stat().st_size)
    assert len(set(sizes)) == 4, "four different pictures"
