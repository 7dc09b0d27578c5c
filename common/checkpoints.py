"""Checkpoints that survive a crash: renamed only when complete, and checked when loaded."""

import contextlib
import functools
import glob
import hashlib
import json
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist

from common import RunError, engines, ranks, require

# Bytes of a checkpoint for each parameter. bfloat16: 2 in hf/, 2 in DeepSpeed's weights, 4 in its
# float32 weights, 8 in Adam's moments; float32: 4, 4 and 8. BEST: the largest share of hf/ in it.
BYTES, BEST = 16, 0.25


class Checkpoints:
    """<folder>/checkpoints/iteration_<number>/ has the state of each DeepSpeed engine; hf/, the
    policy for transformers, vLLM and evaluate.py (and critic_hf/, for analysis/); settings.json;
    and manifest.json, the digests of all these files. best_<number>/ is the best one's hf/ only."""

    def __init__(self, folder: str, settings: dict, keep: int):
        """`settings`: all that decides the run's results; `keep`: how many new checkpoints stay."""
        self.folder, self.settings, self.keep = folder, settings, keep

    def path(self, iteration: int, kind: str = "iteration") -> str:
        return os.path.join(self.folder, "checkpoints", f"{kind}_{iteration:06d}")

    def iterations(self, kind: str = "iteration") -> list[int]:
        """Iterations that have a checkpoint; of the kind "best", those whose hf/ alone is there."""
        names = os.listdir(os.path.join(self.folder, "checkpoints"))
        found = (re.fullmatch(rf"{kind}_(\d+)", name) for name in names)
        return sorted(int(match[1]) for match in found if match)

    def check_room(self, trained: dict) -> None:
        """Raises UsageError where the disk has no room for the checkpoints that are kept, another
        being written and the best one's hf/. (RestEM saves no engine, so it needs 0 here.)"""
        parameters = [p for engine in trained.values() for p in engine.module.parameters()]
        size = BYTES * sum(getattr(p, "ds_numel", p.numel()) for p in parameters) / 1e9

        def measure() -> tuple[float, float]:  # GB that are free, GB that are needed
            names = "unfinished", "best_unfinished", "removed"  # left by a killed run
            for name in names:
                shutil.rmtree(f"{self.folder}/checkpoints/{name}", ignore_errors=True)
            best = 0 if self.iterations("best") else BEST
            missing = self.keep + 1 - len(self.iterations()) + best
            return shutil.disk_usage(self.folder).free / 1e9, size * missing

        free, needed = ranks.from_main(measure)
        require(
            needed <= free,
            f"--output-dir {self.folder}: {free:.3g} GB free, {needed:.3g} GB needed ({size:.3g} "
            f"for each of --keep-checkpoints {self.keep} and for one being written, less for the "
            "best one's weights). Free some space, or keep fewer checkpoints",
        )

    # ---- load

    def load(self, trained: dict) -> int:
        """Loads the newest undamaged checkpoint; returns its iteration, 0 if there is none. Raises
        UsageError where all are damaged, or where it is from a run with other settings."""
        done = self.find_whole()
        for name, engine in trained.items() if done else ():
            with contextlib.chdir(self.path(done)):  # else "[" in it is a pattern to DeepSpeed
                path, _ = engine.load_checkpoint(".", tag=name)
            require(path, f"{self.path(done)} has no state of {name!r}")
        return done

    def find_whole(self) -> int:
        """The newest checkpoint whose files match its manifest; newer ones, which are damaged, get
        another name."""
        found, damaged = ranks.from_main(self.iterations), []
        for iteration in reversed(found):
            path = self.path(iteration)
            manifest = ranks.from_main(functools.partial(read_json, f"{path}/manifest.json"))
            outdated = any(isinstance(digest, str) for digest in manifest.values())
            hint = f"start a new run from its weights: --model {path}/hf"
            require(not outdated, f"{path} was written by an older version of this code; {hint}")
            digests = digest_files(path)
            names = sorted(digests.keys() | manifest.keys())
            damage = [name for name in names if digests.get(name) != manifest.get(name)]
            if manifest and not damage:
                break
            damaged.append(iteration)
            what = ", ".join(damage) if manifest else "manifest.json"
            ranks.say(f"WARNING: checkpoint {iteration} is damaged ({what:.200}): skipped")
        else:
            require(not found, f"{self.folder}: all checkpoints are damaged; start a new run")
            return 0
        saved = ranks.from_main(functools.partial(read_json, f"{path}/settings.json"))
        differing = compare_settings(saved, self.settings)
        require(not differing, f"{path} has other settings: {differing}")
        for bad in damaged if ranks.is_main() else ():
            os.replace(self.path(bad), f"{self.folder}/checkpoints/damaged_{bad}_{time.time():.0f}")
        return iteration

    # ---- save

    def save(self, iteration: int, trained: dict, model: torch.nn.Module, tokenizer) -> None:
        """All ranks must call it. A kill at any moment leaves the last good checkpoint. Raises
        RunError where the new one cannot be written."""
        aside = os.path.join(self.folder, "checkpoints", "unfinished")
        try:
            self.write(aside, trained, model, tokenizer)
        except Exception as error:  # for a full disk each library has its own
            if ranks.is_main():
                shutil.rmtree(aside, ignore_errors=True)  # makes room
            last = max(self.iterations(), default=None)
            safe = f"checkpoint {last} is intact" if last else "there is no earlier one"
            raise RunError(
                f"checkpoint {iteration} could not be written to {self.folder} ({error}); {safe}: "
                "fix that (is the disk full?), then continue with --resume auto"
            ) from error
        if ranks.is_main():
            os.sync()  # else a power cut may leave the name without data
            os.replace(aside, self.path(iteration))
        dist.barrier()

    def write(self, aside: str, trained: dict, model: torch.nn.Module, tokenizer) -> None:
        if ranks.is_main():
            shutil.rmtree(aside, ignore_errors=True)
        dist.barrier()
        for name, engine in trained.items():
            engine.save_checkpoint(aside, tag=name, save_latest=False)
        others = {f"{name}_hf": trained[name].module for name in trained.keys() - {"policy"}}
        for name, module in {"hf": model, **others}.items():
            with engines.whole(module.parameters()):
                if ranks.is_main():
                    module.save_pretrained(os.path.join(aside, name))
        if ranks.is_main():
            tokenizer.save_pretrained(os.path.join(aside, "hf"))
            write_json(os.path.join(aside, "settings.json"), self.settings)
        dist.barrier()
        digests = digest_files(aside)
        if ranks.is_main():
            write_json(os.path.join(aside, "manifest.json"), digests)

    def tidy_up(self, scores: dict[int, float]) -> None:
        """Points the links hf and best at the newest checkpoint and at that of the highest of
        `scores` {iteration: score}; removes those that are not to be kept."""
        done, kept = self.iterations(), self.iterations("best")
        choices = [iteration for iteration in sorted({*done, *kept}) if iteration in scores]
        best = max(choices, key=scores.__getitem__, default=done[-1])
        if best not in kept:  # hard links: a second name, no more space
            aside = os.path.join(self.folder, "checkpoints", "best_unfinished")
            shutil.rmtree(aside, ignore_errors=True)
            shutil.copytree(f"{self.path(best)}/hf", aside, copy_function=link_or_copy)
            os.replace(aside, self.path(best, "best"))
        self.link("hf", f"{self.path(done[-1])}/hf")
        self.link("best", self.path(best, "best"))
        outdated = [self.path(iteration, "best") for iteration in kept if iteration != best]
        for path in [*outdated, *map(self.path, done[: -self.keep])]:
            # renamed first: a network disk may not delete files that somebody reads
            aside = f"{self.folder}/checkpoints/removed/{os.path.basename(path)}"
            os.renames(path, f"{aside}_{time.time():.0f}")
            shutil.rmtree(os.path.dirname(aside), ignore_errors=True)

    def link(self, name: str, target: str) -> None:
        """In the run's folder, name -> target, replaced at once: the link is never missing."""
        link = os.path.join(self.folder, name)
        if os.path.lexists(link + ".tmp"):
            os.remove(link + ".tmp")
        os.symlink(os.path.relpath(target, self.folder), link + ".tmp")
        os.replace(link + ".tmp", link)


def link_or_copy(source: str, target: str) -> None:
    """A hard link, a second name for the file; a copy where the disk has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def compare_settings(saved: dict, given: dict) -> str:
    """What differs, "" where nothing does."""
    names = sorted(saved.keys() | given.keys())
    differing = [name for name in names if saved.get(name) != given.get(name)]
    return "; ".join(f"{n} was {saved.get(n)!r}, is {given.get(n)!r}" for n in differing)


def write_json(path: str, content: dict) -> None:
    with open(path + ".tmp", "w") as file:
        json.dump(content, file, indent=1)
    os.replace(path + ".tmp", path)


def read_json(path: str) -> dict:
    """{} where the file is missing or is not JSON."""
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


PIECE, BLOCK = 2**26, 2**20  # bytes of a piece, and bytes read at a time


def digest_files(folder: str, wanted: str = ".*") -> dict[str, list[str]]:
    """{name: SHA-256 of each of its pieces} of the files below the folder whose names match
    `wanted`, without manifest.json. Ranks and threads share pieces rather than files, since one
    file may be as large as all others."""

    def list_pieces() -> list[tuple[str, int]]:  # rank 0 asks: a network disk may lag elsewhere
        paths = glob.glob(os.path.join(glob.escape(folder), "**"), recursive=True)
        sizes = {os.path.relpath(p, folder): os.path.getsize(p) for p in paths if os.path.isfile(p)}
        sizes = {name: size for name, size in sizes.items() if re.fullmatch(wanted, name)}
        sizes.pop("manifest.json", None)
        pieces = {name: range(0, max(1, size), PIECE) for name, size in sorted(sizes.items())}
        return [(name, start) for name, starts in pieces.items() for start in starts]

    def digest(piece: tuple[str, int]) -> str:
        found = hashlib.sha256()
        with open(os.path.join(folder, piece[0]), "rb") as file:
            file.seek(piece[1])
            for _ in range(0, PIECE, BLOCK):
                found.update(file.read(BLOCK))
        return found.hexdigest()

    pieces = ranks.from_main(list_pieces)
    with ThreadPoolExecutor(8) as pool:  # reading and hashing let other threads run
        digests = ranks.gather(list(pool.map(digest, ranks.share(pieces))))
    found: dict[str, list[str]] = {}
    for (name, _), one in zip(pieces, digests, strict=True):
        found.setdefault(name, []).append(one)
    return found
