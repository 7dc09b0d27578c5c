"""The page of analysis/diff.py has every line, marks what differs, and works in a browser."""

import html
import itertools
import json
import re

import pytest

from analysis import diff
from common import UsageError
from tests.conftest import CHROMIUM, open_page
from tests.sync_scripts import COPIES, SOURCE, count_differences, read_file

PAIRS = list(itertools.product(diff.NAMES, repeat=2))
ONE_TEXT = [path.removesuffix(".py") for path in (SOURCE, *COPIES)]  # the policy-gradient scripts


@pytest.fixture(scope="module")
def page() -> str:
    return diff.make_page("ppo", "vineppo")


@pytest.fixture(scope="module")
def data(page) -> dict:
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def rows_of(blocks: list) -> list[tuple]:
    """(i, j, differs, marks in i, marks in j)"""
    rows = []
    for block in blocks:
        if isinstance(block[0], list):
            rows += [(i, j, True, ours, theirs) for i, j, ours, theirs in block]
        else:
            i, j, n = block
            rows += [(i + k, j + k, False, [], []) for k in range(n)]
    return rows


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_every_line_is_there_in_order_and_what_is_not_marked_is_the_same(data, one, other):
    ours, theirs = (read_file(f"{name}.py").splitlines() for name in (one, other))
    assert data["lines"][one] == ours and data["lines"][other] == theirs
    rows = [row for _, blocks in data["pairs"][f"{one} {other}"] for row in rows_of(blocks)]
    assert [i for i, *_ in rows if i >= 0] == list(range(len(ours)))
    assert [j for _, j, *_ in rows if j >= 0] == list(range(len(theirs)))
    for i, j, differs, our_marks, their_marks in rows:
        if not differs:
            assert ours[i] == theirs[j]
        elif our_marks or their_marks:
            left, right = unmarked(ours[i], our_marks), unmarked(theirs[j], their_marks)
            assert left == right and left


def unmarked(line: str, marks: list[list[int]]) -> str:
    for start, end in reversed(marks):
        line = line[:start] + line[end:]
    return "".join(line.rstrip("=").split())


@pytest.mark.parametrize(("one", "other"), list(itertools.product(ONE_TEXT, repeat=2)))
def test_as_many_rows_differ_as_the_readme_says(data, one, other):
    """For these scripts only: in the others a line may match one of another section, which the page
    never sets side by side."""
    blocks = [block for _, found in data["pairs"][f"{one} {other}"] for block in found]
    hunks = [block for block in blocks if isinstance(block[0], list)]
    found = sum(map(len, hunks)), len(hunks)
    assert found == count_differences(read_file(f"{one}.py"), read_file(f"{other}.py"))


def test_every_section_that_differs_has_a_note(data):
    used = set()
    for (one, other), (section, blocks) in (
        (pair, found) for pair in PAIRS for found in data["pairs"][" ".join(pair)]
    ):
        rows = rows_of(blocks)
        for side, name in enumerate((one, other)):
            if any(row[2] for row in rows) and any(row[side] >= 0 for row in rows):
                key = (name, section) if (name, section) in diff.NOTES else ("", section)
                if name in diff.OURS:
                    assert diff.NOTES[key][1], key
                    used.add(key)
    assert used == set(diff.NOTES)  # none is for a section that is not there


def test_similar_lines_stand_beside_each_other():
    ours = {3: "a = compute(x, y)", 4: "# nothing like it", 5: "return a + 1"}
    theirs = {7: "return a + 2"}
    assert diff.pair_lines(ours, theirs) == [(3, -1), (4, -1), (5, 7)]
    assert diff.mark_words(ours[5], theirs[7]) == ([[11, 12]], [[11, 12]])
    assert diff.mark_words("x = 1e-4", "  x = 1e-5") == ([[4, 8]], [[0, 2], [6, 10]])
    assert diff.mark_words(ours[4], theirs[7]) == ([], [])


def test_equations_have_subscripts():
    shown = diff.as_html("A_t = Σ_l x^l δ_{t+l} - kl_coef · π(y | y_{<t})")
    expected = "A<sub>t</sub> = Σ<sub>l</sub> x<sup>l</sup> δ<sub>t+l</sub> \u2212 kl_coef"
    assert shown == expected + " · π(y | y<sub>&lt;t</sub>)"


@pytest.mark.parametrize("names", [("vinepo", "ppo"), ("ppo", "experiments"), ("", "ppo")])
def test_a_wrong_name_is_refused_with_the_right_ones(names, tmp_path):
    with pytest.raises(UsageError) as error:
        diff.main(*names, output=str(tmp_path / "diff.html"))
    assert str(error.value).endswith(
        f": no such script; there are {', '.join(diff.NAMES)}, and your copies"
    )
    assert not list(tmp_path.iterdir())


def test_a_copy_of_ones_own_is_compared_and_no_other_file(tmp_path, monkeypatch):
    copy = diff.read_file("rloo.py").replace("(group_size - 1)", "group_size")
    files = {"mine.py": copy, "evaluate.py": "print()\n"}
    read = diff.read_file
    monkeypatch.setattr(diff, "read_file", lambda name: files.get(name) or read(name))
    monkeypatch.setattr(diff.os.path, "exists", lambda path: True)
    page = diff.make_page("rloo", "mine")
    data = json.loads(re.search(r"<script[^>]*>(\{.*?\})</script>", page, re.DOTALL)[1])
    assert data["first"] == ["rloo", "mine"] and data["lines"]["mine"] == copy.splitlines()
    rows = [block for _, blocks in data["pairs"]["rloo mine"] for block in blocks]
    (changed,) = [block for block in rows if isinstance(block[0], list)]
    assert len(changed) == 1
    with pytest.raises(UsageError, match=r"evaluate\.py: no copy of a script, without sections"):
        diff.main("rloo", "evaluate", output=str(tmp_path / "diff.html"))


def test_a_folder_and_a_picture_without_a_browser_are_refused(page, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=f"--output {tmp_path}: a folder; name a file"):
        diff.main(output=str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="--picture: no chromium or google-chrome"):
        diff.take_picture(page, str(tmp_path / "diff.png"))


def test_the_page_is_one_file_that_asks_for_nothing(page, tmp_path):
    diff.main("ppo", "vineppo.py", output=str(tmp_path / "new/diff.html"))
    assert (tmp_path / "new/diff.html").read_text(encoding="utf-8") == page
    assert len(page.encode()) < 3e6
    assert "default-src 'none'" in page  # so a browser would refuse it, too
    assert not re.search(r"https?:|//\w+\.|src=|url\(|@import|<link", page)


# ---- in a browser --------------------------------------------------------------------------------

WATCH = """<script>
let refused = 0;
addEventListener("securitypolicyviolation", () => refused += 1);
</script>"""
DRIVE = """<script>
const found = {refused};
const all = selector => [...document.querySelectorAll(selector)];
const press = (key, target = document.body) =>
  target.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
const shown = () => ({
  title: document.title,
  counted: counted.textContent,
  texts: ["left", "right"].map(side => all(`.code.${side}`).map(code => code.textContent)),
  open: all("section > details[open]").map(box => box.id),
  folded: all("section > details:not([open])").map(box => box.id),
  notes: all(".notes").map(notes => notes.textContent),
  marks: all("mark").map(mark => mark.textContent),
});
const where = () => {
  const {top} = document.activeElement.getBoundingClientRect();
  const notes = document.activeElement.closest("details").querySelector(".notes");
  const isSeen = top >= notes.getBoundingClientRect().bottom && top < innerHeight;
  return [all(".hunk").indexOf(document.activeElement), isSeen, place.textContent];
};
const light = colour => {
  const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(x => x / 255)
    .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
};
const contrast = element => {
  const colour = light(getComputedStyle(element).color);
  let behind = element;
  while (/, 0\\)$/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
  const other = light(getComputedStyle(behind).backgroundColor);
  return (Math.max(colour, other) + 0.05) / (Math.min(colour, other) + 0.05);
};

found.first = shown();
found.isDark = matchMedia("(prefers-color-scheme: dark)").matches;
const hasText = element => [...element.childNodes].some(x => x.nodeType === 3 && x.data.trim());
const texts = all("body *").filter(element => element.checkVisibility() && hasText(element));
found.contrasts = texts.map(element => [element.className || element.tagName, contrast(element)]);
found.jumps = ["n", "n", "j", "p", "k", "k", "x"].map(key => { press(key); return where(); });
press("n", left);
found.inMenu = where();
document.getElementById("next").click();
found.byButton = where();
const folded = all("section > details:not([open]) > summary")[0];
found.tabIndex = [folded, left, right].map(element => element.tabIndex);
folded.click();
found.isOpen = folded.parentElement.open;
all("section > details").forEach(box => box.open = false);
press("n");
found.fromFolded = where();
for (let k = 0; k < 30; k++) press("n");
found.last = where();
left.value = "grpo";
right.value = "rloo";
right.dispatchEvent(new Event("change"));
found.second = shown();
press("n");
found.inSecond = where();
found.resources = performance.getEntriesByType("resource").length;
found.refused = refused;
document.body.replaceChildren(make("pre", {id: "found"}, JSON.stringify(found)));
</script>"""


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_the_page_in_a_browser(page, data, scheme, tmp_path):
    driven = page.replace("<head>", "<head>" + WATCH).replace("</body>", DRIVE + "</body>")
    (tmp_path / "diff.html").write_text(driven, encoding="utf-8")
    setting = f"--blink-settings=preferredColorScheme={['dark', 'light'].index(scheme)}"
    text = open_page(tmp_path / "diff.html", "--window-size=1280,720", setting)
    found = json.loads(html.unescape(re.search(r'<pre id="found">(.*?)</pre>', text, re.S)[1]))

    for now, one, other in ((found["first"], "ppo", "vineppo"), (found["second"], "grpo", "rloo")):
        assert now["title"] == f"{one}.py and {other}.py"
        assert now["texts"] == [data["lines"][one], data["lines"][other]]
        sections = data["pairs"][f"{one} {other}"]
        rows, _ = count_differences(read_file(f"{one}.py"), read_file(f"{other}.py"))
        different = [s.replace(" ", "-") for s, b in sections if any(r[2] for r in rows_of(b))]
        assert now["open"] == different and len(different) + len(now["folded"]) == len(sections)
        start = f"{rows} rows differ, in {len(different)} of {len(sections)} sections"
        assert now["counted"].startswith(start)
    assert any("R(rolloutk)" in note for note in found["first"]["notes"])
    assert "values" in found["first"]["marks"]

    places = [[at, True, f"difference {at + 1} of 19"] for at in (0, 1, 2, 1, 0, 0, 0)]
    assert found["jumps"] == places
    assert found["inMenu"] == places[0] and found["byButton"] == places[1]
    assert found["tabIndex"] == [0, 0, 0] and found["isOpen"]
    assert found["fromFolded"] == places[2]
    assert found["last"] == [18, True, "difference 19 of 19"]  # far below where the page began
    assert found["inSecond"] == [0, True, "difference 1 of 7"]

    assert found["resources"] == found["refused"] == 0
    assert found["isDark"] == (scheme == "dark")
    assert len(found["contrasts"]) > 200
    assert min(ratio for _, ratio in found["contrasts"]) >= 4.5  # WCAG AA


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
def test_the_picture(page, tmp_path):
    diff.take_picture(page, str(tmp_path / "diff.png"))
    picture = (tmp_path / "diff.png").read_bytes()
    assert picture[:4] == b"\x89PNG" and int.from_bytes(picture[16:20]) == 1400
    assert len(picture) > 100_000  # an empty page would be small
