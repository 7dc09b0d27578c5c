"""The idea of VinePPO as a picture, drawn from a response and its rollouts (analysis/walkthrough.py
calls it): the steps in a row, a circle for each state, and K rollouts hanging from it."""

import html
from types import SimpleNamespace

STEP, LEFT, ROW = 120, 40, 112  # width of a step; x of the first state; y of the row of states
STYLE = """text{font:14px sans-serif;fill:#222;text-anchor:middle}
.step,.value{font:12px monospace}.note{font-size:13px;fill:#555;text-anchor:start}
.credit{font-size:17px;font-weight:bold;fill:#777}
.line{fill:none;stroke:#999}.state{fill:#fff;stroke:#555;stroke-width:1.5}.blame{fill:#fbe6d9}
.right,.gain{fill:#0072b2}.wrong,.loss{fill:#d55e00}
@media(prefers-color-scheme:dark){text{fill:#e6e6e6}.note{fill:#aaa}.credit{fill:#999}
.state{fill:#161b22;stroke:#aaa}.blame{fill:#4a2a14}.right,.gain{fill:#58b4f0}
.wrong,.loss{fill:#ff8c4a}}"""


def draw(facts: SimpleNamespace) -> str:
    """An SVG, light and dark, without scripts; what a model wrote is escaped."""
    count, k = len(facts.texts), len(facts.rollouts[0])
    end, bottom = LEFT + count * STEP, ROW + 54 + 18 * k
    parts = []

    def text(x: float, y: float, what: str, kind: str) -> None:
        parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{html.escape(what)}</text>')

    def box(x: float, y: float, width: float, height: float, kind: str) -> None:
        place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"'
        parts.append(f'<rect {place} class="{kind}"/>')

    text(10, 22, f"One response to {facts.prompt.strip()} with its {count} steps.", "note")
    text(10, 42, "Between two states: the step's advantage, the change in value.", "note")
    box(LEFT + facts.worst * STEP + 4, ROW - 56, STEP - 8, 44, "blame")
    parts.append(f'<path d="M{LEFT} {ROW}H{end}" class="line"/>')
    for i, step in enumerate(facts.texts):
        x, change = LEFT + i * STEP, facts.advantages[i]
        text(x + STEP / 2, ROW - 38, step.strip(), "step")
        kind = "gain" if change > 0 else "loss" if change < 0 else ""
        text(x + STEP / 2, ROW - 16, f"{change:+.2f}" if kind else "0", f"credit {kind}")
        for j, (_, reward) in enumerate(facts.rollouts[i]):
            y = ROW + 36 + 18 * j
            parts.append(f'<path d="M{x} {ROW}C{x} {y} {x} {y} {x + 24} {y}" class="line"/>')
            text(x + 34, y + 5, *(("✓", "right") if reward == 1 else ("✗", "wrong")))
        parts.append(f'<circle cx="{x}" cy="{ROW}" r="17" class="state"/>')
        text(x, ROW + 4, f"{facts.values[i]:.2f}", "value")
    box(end - 17, ROW - 15, 34, 30, "state")
    text(end, ROW + 5, f"{facts.reward:g}", "value")
    text(end, ROW + 34, "reward", "step")
    words = (
        f"In a circle: the value of the state, the share of its {k} rollouts that end right (✓)."
    )
    text(10, bottom, words, "note")
    size = f'width="{end + 45}" height="{bottom + 12}" viewBox="0 0 {end + 45} {bottom + 12}"'
    title = "VinePPO measures the value of each state by rollouts"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{title}</title>'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )
