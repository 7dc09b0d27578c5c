"""What the scripts do when numbers break, on the episodes that tests/replay.py recorded:

    python -m tests.faults --folder FOLDER --model MODEL

Each case breaks one thing in one run; prints a line of JSON for each: the error, the number of
optimizer steps, the metrics, what was dumped. One process: the engines start once.
"""

import importlib
import itertools
import json
import os
import weakref

import torch
import tyro
from transformers import PreTrainedModel

from common import RunError, UsageError, engines, grading, ranks
from tests import replay
from tests.record import write_problems

OTHERS = ("restem", "dpo_pos", "sft")
FAULTS = ("loss", "gradient", "logprob", "reference", "ratio")
FAULTS += ("stale", "stale at length", "stale before it")
CASES = [  # (script, what breaks)
    *(("vineppo", fault) for fault in FAULTS),
    *((script, "gradient") for script in ("ppo", "grpo", "rloo", *OTHERS)),
    *((script, "loss") for script in OTHERS),
    ("ppo", "critic"),
    ("restem", "stale at length"),
    *((script, "nothing right") for script in ("restem", "dpo_pos")),
    *((script, "ratio") for script in ("ppo", "grpo", "rloo")),
    ("restem", "twice"),  # nothing breaks: what is left of the first engine when the second comes
]
SFT = dict(task="jsonl", num_epochs=4 * 8 / 3000, batch_size=8, eval_every=0)


def break_logprobs(module, fault: str) -> None:
    """The second pass with a gradient, or the first without, gives NaN or infinity."""
    compute, calls = module.compute_logprobs, []

    def broken(model, input_ids, prompt_lens, response_mask, temperature):
        logprobs = compute(model, input_ids, prompt_lens, response_mask, temperature)
        if logprobs.requires_grad:
            calls.append(1)
            if len(calls) == 2 and fault == "loss":  # infinite, with a slope that is not
                logprobs = logprobs - response_mask * torch.inf
            elif len(calls) == 2 and fault == "gradient":  # its value is 0, its slope is infinite
                logprobs = logprobs + (logprobs - logprobs.detach()).sqrt()
        elif fault == ("reference" if isinstance(model, PreTrainedModel) else "logprob"):
            calls.append(0)  # the policy would be DeepSpeed's engine
            if len(calls) == 1:
                logprobs[0, 0] = -torch.inf
        return logprobs

    module.compute_logprobs = broken


def break_critic(module) -> None:
    compute = module.compute_value_loss

    def broken(*arguments):
        loss, sums = compute(*arguments)
        return loss * torch.nan, sums

    module.compute_value_loss = broken


def explode_ratio(module) -> None:
    """The second minibatch's ratio looks like an explosion: finite, but above 10. Its gradient is
    large, so that the next step shows whether any of it is left."""
    compute, calls = module.compute_policy_loss, []

    def exploded(*arguments):
        loss, sums = compute(*arguments)
        calls.append(1)
        factor = 100.0 if len(calls) == 2 else 1.0
        return loss * factor, {**sums, "policy/ratio": sums["policy/ratio"] * factor}

    module.compute_policy_loss = exploded


draw = ranks.draw


def draw_the_first(num_items: int, start: int, count: int, *seed) -> list[int]:
    return draw(num_items, 0, count, *seed)


def watch_engines() -> list[int]:
    """Of each model that is loaded: how many parameters and engines from before it are alive."""
    load, initialize, known, alive = engines.load_model, engines.initialize, [], []

    def load_and_count(*arguments):
        alive.append(sum(one() is not None for one in known))
        return load(*arguments)

    def initialize_and_know(*arguments):
        engine = initialize(*arguments)
        known.extend(map(weakref.ref, [engine, engine.module, *engine.module.parameters()]))
        return engine

    engines.load_model, engines.initialize = load_and_count, initialize_and_know
    return alive


def main(folder: str, model: str) -> None:
    ranks.set_up()
    problems = os.path.join(folder, "problems")
    write_problems(problems)
    replay.replay_samples(folder)
    recorded, step, norms = replay.Replay.recorded, engines.step, []

    def record_step(engine, learning_rate: float) -> float:
        norms.append(step(engine, learning_rate))
        return norms[-1]

    engines.step = record_step
    for script, fault in CASES:
        module = importlib.reload(importlib.import_module(script))
        output = os.path.join(folder, "faults", f"{script}-{fault}")
        options = replay.OPTIONS | dict(temperature=1.9) | replay.OF_SCRIPT.get(script, {})
        if script == "sft":
            options = SFT | dict(data_dir=problems)
        replay.Replay.recorded = recorded
        grading.grade_all = replay.grade_by_sum
        if fault == "nothing right":
            grading.grade_all = lambda tokenizer, samples, answers, rule: [0.0] * len(samples)
        elif fault in ("loss", "gradient", "logprob", "reference"):
            break_logprobs(module, fault)
        elif fault == "critic":
            break_critic(module)
        elif fault == "ratio":
            explode_ratio(module)
        elif fault == "twice":  # the same prompts, which were recorded, and hardly other weights
            ranks.draw, alive = draw_the_first, watch_engines()
            scores = itertools.cycle([0.5, 0.25])  # of each walk's two checkpoints
            replay.Replay.evaluate = lambda *_, scores=scores: [next(scores)]
            options |= dict(num_iterations=2, learning_rate=1e-9)
        else:  # the sampler's log-probs are those of other weights, for all, the longest, the rest
            longest = max(len(s.ids) for group in recorded.values() for s in group)
            stale = {"stale": (0, longest), "stale at length": (longest, longest)}
            first, last = stale.get(fault, (0, longest - 1))
            replay.Replay.recorded = {
                key: [
                    s._replace(logprobs=[x - 0.01 for x in s.logprobs])
                    if first <= len(s.ids) <= last
                    else s
                    for s in group
                ]
                for key, group in recorded.items()
            }
        norms.clear()
        error = ""
        try:
            module.main(module.Args(model=model, output_dir=output, **options))
        except (RunError, UsageError) as raised:
            error = str(raised)
        found = {"case": [script, fault], "error": error, "norms": list(norms)}
        found["alive"] = alive if fault == "twice" else []
        found["dumped"] = sorted(name for name in os.listdir(output) if name.endswith(".pt"))
        with open(os.path.join(output, "metrics.jsonl")) as file:
            found["metrics"] = [json.loads(line) for line in file]
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    tyro.cli(main)
    os._exit(0)
