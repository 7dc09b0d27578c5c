"""A run's folder and its log: metrics, episodes, the progress bar, the moment to stop."""

import ctypes
import dataclasses
import json
import math
import os
import signal
import sys
import time

import torch
from tqdm import tqdm

from common import RunError, engines, flags, ranks, require
from common.checkpoints import Checkpoints, compare_settings, read_json, write_json
from given import folder, machine, tracking
from mathequal import worker

SHOWN = {  # on the console: the name there, and what it means, which is said once
    "rollout/reward": ("reward", "share of the sampled responses that are right"),
    "loss/sft": ("loss", "minus the mean log-prob of a token of the solutions"),
    "eval/pass@1": ("pass@1", "share of right responses to validation problems"),
    "eval/loss": ("eval loss", "the loss on validation problems"),
    "adv/undecided": ("undecided", "share of states or groups with right and wrong outcomes"),
    "policy/grad_norm": ("grad norm", "length of the gradient before it is clipped"),
    "dpo/chosen_logratio": ("chosen", "log-prob of right responses, less the reference's"),
    "dpo/rejected_logratio": ("rejected", "that of wrong responses"),
    "policy/weight_distance": ("weights moved", "distance from the SFT model, relative"),
    "policy/sampler_gap": ("sampler gap", "mean |log-prob by vLLM - by the trainer|"),
}
# A run stops when the mean over tokens of |log-prob of the sampler - of the trainer| is above this,
# 1,000 times what different kernels cause. (In bfloat16 one missed update at 1e-6 is below it.)
MAX_SAMPLER_GAP = {"float32": 1e-4, "bfloat16": 0.1}


class Run:
    """A folder with args.json, metrics.jsonl, episodes.jsonl, tensorboard/ and checkpoints/; and hf
    and best, links to the newest checkpoint and to that with the highest pass@1 (sft.py: the lowest
    loss) on validation problems, in the form that transformers, vLLM and evaluate.py load."""

    def __init__(self, script: str, args):
        """Checks the folder and claims it. Raises UsageError where it cannot be written to, where
        another process uses it, where it holds a run and --resume is not given; and where --resume
        finds no run, or one with other settings."""
        rank, world_size, _ = ranks.set_up()
        script = os.path.splitext(os.path.basename(script))[0]
        path = args.output_dir or f"runs/{script}-{args.task}-seed{args.seed}"
        self.folder = os.path.expanduser(path)
        self.args, self.is_main = args, rank == 0
        settings = {**dataclasses.asdict(args), "script": script, "world_size": world_size}
        settings["dtype"] = engines.dtype_of(args)
        self.settings = {name: x for name, x in settings.items() if name not in flags.FREE}
        if self.is_main:
            if args.track:
                tracking.check()
            self.lock = folder.claim(self.folder, args.resume)  # until this process ends
        # so that a resumed run notices other weights or problems there
        self.settings["model_files"] = folder.fingerprint(args.model, folder.MODEL_FILES)
        self.settings["data_files"] = folder.fingerprint(args.data_dir, folder.DATA_FILES)
        self.checkpoints = Checkpoints(self.folder, self.settings, args.keep_checkpoints)
        if self.is_main and args.resume == "auto":
            begun = read_json(os.path.join(self.folder, "args.json"))
            differing = compare_settings(begun, self.settings)
            what = f"--resume auto: {self.folder} needs the settings that it began with"
            require(not differing, f"{what}: {differing}")

    def open(self, trained: dict, total: int) -> int:
        """Loads the newest whole checkpoint of the `trained` engines, if there is one; returns how
        many of `total` iterations are done."""
        os.makedirs(os.path.join(self.folder, "checkpoints"), exist_ok=True)
        folder.check_shared(self.folder)
        done = self.checkpoints.load(trained)
        if done < total or not total:
            self.checkpoints.check_room(trained)
        if self.is_main:
            machine.say_how_threads_wait()
            if self.args.track:  # before the folder holds a run: it may fail
                tracking.start(self.folder, self.settings)
            write_json(os.path.join(self.folder, "args.json"), self.settings)
            self.keep_lines("metrics.jsonl", done)
            self.keep_lines("episodes.jsonl", done)
            if done:  # a kill may have come before the links were set
                self.checkpoints.tidy_up(self.read_scores())
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(f"{self.folder}/tensorboard", purge_step=done + 1)
        self.in_a_log = not sys.stderr.isatty()  # whole lines there, and no bar
        self.bar = tqdm(total=total, initial=done, disable=self.in_a_log or not self.is_main)
        self.iteration, self.unexplained = done + 1, dict(SHOWN)
        self.phases: dict[str, float] = {}
        self.phase_name, self.phase_start = "", time.perf_counter()
        self.terminated = self.stopping = False  # this rank was; all ranks know that one was
        signal.signal(signal.SIGTERM, self.on_sigterm)
        return done

    def expect(self, total: int) -> None:
        """Tells the number of iterations, where `open` could not know it."""
        self.bar.total = total

    def on_sigterm(self, *_) -> None:
        """Lets the iteration end and saves it, then ends the run. A kill loses this iteration."""
        self.terminated = True

    def keep_lines(self, name: str, done: int) -> None:
        """Drops what a killed run wrote after its newest checkpoint, and a line that is cut off."""
        path, lines = os.path.join(self.folder, name), []
        if os.path.exists(path):
            with open(path) as file:
                complete = [line for line in file if line.endswith("\n")]
            lines = [line for line in complete if json.loads(line)["iteration"] <= done]
        with open(path + ".tmp", "w") as file:
            file.writelines(lines)
        os.replace(path + ".tmp", path)

    def read_scores(self) -> dict[int, float]:
        """{iteration: pass@1 or, for sft.py, minus the loss} of those that were evaluated."""
        with open(os.path.join(self.folder, "metrics.jsonl")) as file:
            lines = list(map(json.loads, file))
        losses = {line["iteration"]: -line["eval/loss"] for line in lines if "eval/loss" in line}
        scored = (line for line in lines if "eval/pass@1" in line)
        return losses | {line["iteration"]: line["eval/pass@1"] for line in scored}

    # ---- the log

    def phase(self, name: str) -> None:
        """From now on time counts for this phase; metrics.jsonl gets the seconds as time/<name>."""
        now = time.perf_counter()
        if self.phase_name:
            key = f"time/{self.phase_name}"
            self.phases[key] = self.phases.get(key, 0.0) + now - self.phase_start
        self.phase_name, self.phase_start = name, now
        self.bar.set_description(name)

    def log(self, iteration: int, metrics: dict[str, float]) -> None:
        """Ends the phase and appends a line to metrics.jsonl. (The time of a save, which comes
        after the line that it makes safe, counts in the next line.) All ranks must call it."""
        self.phase("")
        seconds = sum(self.phases.values())
        line = {"iteration": iteration, **metrics, **self.phases, "time/iteration": seconds}
        of_ranks = ranks.gather([(worker.take_failures(), self.terminated)])
        failures, stopping = zip(*of_ranks, strict=True)
        if sum(failures):
            line["rollout/grading_failures"] = sum(failures)
        self.stopping = any(stopping)  # one answer for all ranks
        self.phases, self.iteration = {}, iteration + 1
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # or what the C library keeps grows for hours
        if self.is_main:
            self.append("metrics.jsonl", line)
            for name, value in line.items():
                self.tensorboard.add_scalar(name, value, iteration)
            self.tensorboard.flush()
            if self.args.track:
                import wandb

                wandb.log(line, step=iteration)
        shown = [f"{SHOWN[name][0]} {line[name]:.3g}" for name in SHOWN if name in line]
        self.shows_episode = iteration == 1 or "eval/pass@1" in line
        told = line.keys() & {"rollout/reward", "eval/loss", "eval/pass@1"}
        if told or (self.in_a_log and iteration % 10 == 0):
            for name in [name for name in self.unexplained if name in line]:
                ranks.say("  {}: {}".format(*self.unexplained.pop(name)))
            ranks.say(f"{iteration}: {', '.join(shown)}, {seconds:.1f} s")
        self.bar.set_postfix_str("".join(shown[:1]), refresh=False)
        self.bar.update()

    def check(self, metrics: dict[str, float], **batch: torch.Tensor) -> None:
        """Raises RunError where a number is not finite or sampler and trainer differ, and writes
        it all to <folder>/stopped_<iteration>.pt. All ranks must call it with the same values."""
        wrong = [f"{name} is {x}" for name, x in metrics.items() if not math.isfinite(x)]
        wrong += [f"{name} is not finite" for name, x in batch.items() if not x.isfinite().all()]
        gap = metrics.get("policy/sampler_gap", 0.0)
        if gap > (limit := MAX_SAMPLER_GAP[engines.dtype_of(self.args)]):
            why = "vLLM's weights or arithmetic are not those of the trainer"
            wrong.append(f"policy/sampler_gap is {gap:.2g}, above {limit:g}: {why}")
        if not wrong:
            return
        path = os.path.join(self.folder, f"stopped_{self.iteration:06d}.pt")
        if self.is_main:
            torch.save({**batch, **metrics}, path)
        raise RunError(
            f"iteration {self.iteration}: {', '.join(wrong)}; the batch is saved in {path}, and "
            "--resume auto goes back to the last checkpoint before it"
        )

    def episode(
        self, done: int, prompt: str, texts: list, values: list, advantages: list, reward: float
    ) -> None:
        """Appends a response, step by step, to episodes.jsonl, and shows one now and then."""
        if not self.is_main:
            return
        rows = zip(texts, values, advantages, strict=True)
        steps = [dict(zip(("text", "value", "advantage"), row, strict=True)) for row in rows]
        line = {"iteration": done, "prompt": prompt, "reward": reward, "steps": steps}
        self.append("episodes.jsonl", line)
        if self.shows_episode:
            shown = [f"  {s['value']:5.2f} {s['advantage']:+9.2f}  {s['text']!r}" for s in steps]
            shown = [f"  {prompt!r}", "  value advantage  step", *shown, f"  reward {reward:g}"]
            ranks.say("\n".join(shown))
        self.shows_episode = False

    def append(self, name: str, line: dict) -> None:
        with open(os.path.join(self.folder, name), "a") as file:
            file.write(json.dumps(line) + "\n")

    # ---- the end

    def save(self, iteration: int, trained: dict, model: torch.nn.Module, tokenizer) -> None:
        """Writes a checkpoint; ends the process after a SIGTERM. All ranks must call it."""
        self.phase("save")
        self.checkpoints.save(iteration, trained, model, tokenizer)
        if self.is_main:
            self.checkpoints.tidy_up(self.read_scores())
        if self.stopping and iteration != self.bar.total:
            ranks.say(f"SIGTERM: checkpoint {iteration} is written; continue with --resume auto")
            sys.stdout.flush()
            os._exit(128 + signal.SIGTERM)

    def close(self) -> None:
        self.bar.close()
        if self.is_main:
            self.tensorboard.close()
            open(os.path.join(self.folder, "finished"), "w").close()
            ranks.say(f"checkpoint: {os.path.join(self.folder, 'hf')}")


def mean_of(dicts: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each key over the dicts that have it."""
    names = {name: None for one in dicts for name in one}
    values = {name: [one[name] for one in dicts if name in one] for name in names}
    return {name: sum(some) / len(some) for name, some in values.items()}
