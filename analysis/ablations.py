"""K and temperature, as in the paper, beside the runs of `make compare` (or compare-quick).

    python -m analysis.ablations

Makes the runs that are missing, from the same SFT checkpoints and with the same seeds: VinePPO with
K = 1, 3, 9 (no sharing of rollouts), VinePPO and PPO at temperatures 0.8 and 1.0.
"""

import statistics
import time
from dataclasses import dataclass

import tyro
from matplotlib import pyplot as plt
from tqdm import tqdm

from analysis import figures
from analysis.compare import (
    COLOURS,
    NAMES,
    describe_machine,
    draw_band,
    interval,
    read_curve,
    save,
    table,
    train,
    use_log_axis,
    write_block,
)
from common import require

UNSHARED = ("--no-share-rollouts",)
KS = {1: ("K = 1", "#f2a766", "^"), 3: ("K = 3", "#d55e00", "s"), 9: ("K = 9", "#7a3500", "o")}
TEMPERATURES = {0.6: "-", 0.8: "--", 1.0: ":"}


@dataclass
class Args:
    folder: str = ""
    """folder with the runs of `make compare`; empty: runs/compare, or runs/quick without it"""
    output: str = ""
    """where ablations.png and results.md go; default docs, or runs/quick for those of runs/quick"""
    jobs: int = figures.Args.jobs


def draw_ablations(
    of_k: dict[int, list], of_temperature: dict[tuple[str, float], list], output: str
) -> None:
    """Figures 4 and F.23, K; Figure 8, temperature."""
    figure, panels = plt.subplots(1, 3, figsize=(8.8, 4.1), layout="constrained", sharey=True)
    for k, curves in of_k.items():
        draw_band(panels[0], curves, "iteration", KS[k])
        thousands = [  # no 0 on a log axis
            [{**point, "tokens": point["tokens"] / 1e3} for point in curve[1:]] for curve in curves
        ]
        draw_band(panels[1], thousands, "tokens", KS[k])
    for (method, temperature), curves in sorted(of_temperature.items(), reverse=True):
        style = f"{NAMES[method]}, {temperature:g}", COLOURS[method], ""
        draw_band(panels[2], curves, "iteration", style, line=TEMPERATURES[temperature])
    panels[0].set(xlabel="iteration", xlim=(0, None), ylim=(0, 1))
    panels[0].set_ylabel("pass@1 on validation problems")
    panels[1].set_xlabel("thousand tokens sampled (log scale)")
    use_log_axis(panels[1].xaxis)
    panels[2].set(xlabel="iteration", xlim=(0, None))
    titles = "VinePPO by iterations", "VinePPO by tokens", "temperature"
    for panel, title, columns in zip(panels, titles, (1, 1, 2), strict=True):
        panel.legend(loc="lower center", bbox_to_anchor=(0.5, 1), title=title, ncols=columns)
    save(figure, output)


def write_numbers(of_k: dict, of_temperature: dict, seeds: list[int], output: str) -> None:
    """The block `ablations` of results.md."""

    def last_score(curves: list[list[dict]], form: str = ".3f") -> str:
        return interval([curve[-1]["pass@1"] for curve in curves], form)

    rows = []
    for k, curves in of_k.items():
        tokens = statistics.mean(curve[-1]["tokens"] for curve in curves)
        rows.append([f"K = {k}", last_score(curves), f"{tokens / 1e3:,.0f}"])
    temperatures = [
        f"{NAMES[m]} {', '.join(last_score(of_temperature[m, t], '.2f') for t in TEMPERATURES)}"
        for m in ("vineppo", "ppo")
    ]
    text = f"""<!-- ablations -->
Written by `python -m analysis.ablations`, {time.strftime("%Y-%m-%d")}, on {describe_machine()}.
Means over seeds {", ".join(map(str, seeds))}, ± as above.

{table(["VinePPO, `--no-share-rollouts`", "last pass@1", "thousand tokens"], rows)}
Last pass@1 at temperatures {", ".join(f"{t:g}" for t in TEMPERATURES)}: {"; ".join(temperatures)}.

![pass@1 by K and temperature](ablations.png)

*By `analysis.ablations`.*
<!-- end of ablations -->
"""
    write_block(output, "ablations", text)


def main(args: Args) -> None:
    compared = figures.read_compared(args)
    best, seeds = compared["best"], compared["seeds"]
    require({"vineppo", "ppo"} <= best.keys(), f"{args.folder} lacks runs of VinePPO or PPO")
    of_k = {
        k: [("vineppo_cheap", best["vineppo"], s, *UNSHARED, "--k", str(k)) for s in seeds]
        for k in KS
    }
    of_temperature = {
        (method, t): [(method, best[method], seed, "--temperature", str(t)) for seed in seeds]
        for t in (0.8, 1.0)
        for method in ("vineppo", "ppo")
    }
    wanted = [key for keys in (*of_k.values(), *of_temperature.values()) for key in keys]
    bar = tqdm(unit="run", smoothing=0)
    runs = train(wanted, args.folder, args.jobs, bar)
    bar.close()

    def curves_of(keys: list[tuple]) -> list[list[dict]]:
        return [*map(read_curve, [runs[key] for key in keys], compared["starts"])]

    of_k = {k: curves_of(keys) for k, keys in of_k.items()}
    of_temperature = {(m, 0.6): compared["curves"][m] for m in ("ppo", "vineppo")} | {
        key: curves_of(keys) for key, keys in of_temperature.items()
    }
    draw_ablations(of_k, of_temperature, f"{args.output}/ablations.png")
    page = f"{args.output}/results.md"
    write_numbers(of_k, of_temperature, seeds, page)
    print(f"{page}, ablations.png")


if __name__ == "__main__":
    main(tyro.cli(Args))
