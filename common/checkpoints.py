"""Checkpoints that survive: written aside and renamed when whole, known when damaged."""

import functools
import glob
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time

import torch
import torch.distributed as dist

from common import RunError, engines, ranks, require


class Checkpoints:
    """<folder>/checkpoints/iteration_<number>/ has the state of each DeepSpeed engine; hf/, the
    policy for transformers, vLLM and evaluate.py (and critic_hf/, for analysis/); settings.json;
    and manifest.json, the digests of all these files."""

    def __init__(self, folder: str, settings: dict, keep: int):
        """`settings`: what decides the results of the run; `keep` the newest checkpoints."""
        self.folder, self.settings, self.keep = folder, settings, keep

    def path(self, iteration: int) -> str:
        return os.path.join(self.folder, "checkpoints", f"iteration_{iteration:06d}")

    def iterations(self) -> list[int]:
        names = os.listdir(os.path.join(self.folder, "checkpoints"))
        return sorted(int(name[10:]) for name in names if name.startswith("iteration_"))

    # ---- load

    def load(self, trained: dict) -> int:
        """Loads the newest whole checkpoint, if there is one; returns its iteration, else 0. Raises
        UsageError where all are damaged, or it is another run's."""
        done = self.find_whole()
        for name, engine in trained.items() if done else ():
            path, _ = engine.load_checkpoint(self.path(done), tag=name)
            require(path, f"{self.path(done)}: no state of {name!r} in it")
        return done

    def find_whole(self) -> int:
        """The newest checkpoint whose files are those of its manifest; the damaged ones after it
        are given another name."""
        found, damaged = ranks.from_main(self.iterations), []
        for iteration in reversed(found):
            path = self.path(iteration)
            manifest = ranks.from_main(functools.partial(read_json, f"{path}/manifest.json"))
            digests = digest_files(path)
            names = sorted(digests.keys() | manifest.keys())
            damage = [name for name in names if digests.get(name) != manifest.get(name)]
            if manifest and not damage:
                break
            damaged.append(iteration)
            what = ", ".join(damage) if manifest else "manifest.json"
            ranks.say(f"WARNING: checkpoint {iteration} is damaged ({what:.200}): passed by")
        else:
            where = self.folder
            require(not found, f"{where}: all of its checkpoints are damaged; start a new run")
            return 0
        saved = ranks.from_main(functools.partial(read_json, f"{path}/settings.json"))
        differing = compare_settings(saved, self.settings)
        require(not differing, f"{path}: not of this run: {differing}")
        for bad in damaged if ranks.is_main() else ():
            os.replace(self.path(bad), f"{self.folder}/checkpoints/damaged_{bad}_{time.time():.0f}")
        return iteration

    # ---- save

    def save(self, iteration: int, trained: dict, model: torch.nn.Module, tokenizer) -> None:
        """All ranks must call it. A kill at any moment leaves the last good one. Raises RunError
        where it cannot be written."""
        aside = os.path.join(self.folder, "checkpoints", "unfinished")
        try:
            self.write(aside, trained, model, tokenizer)
        except Exception as error:  # a full disk comes as an error of three libraries
            if ranks.is_main():
                shutil.rmtree(aside, ignore_errors=True)  # room for whoever needs it
            last = max(self.iterations(), default=None)
            safe = f"checkpoint {last} is intact" if last else "there is no other one yet"
            raise RunError(
                f"checkpoint {iteration} could not be written to {self.folder} ({error}); {safe}: "
                "mend that (is the disk full?), then --resume auto"
            ) from error
        if ranks.is_main():
            os.sync()  # or a power cut might leave the name without the data
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
        dist.barrier()

    def tidy_up(self, scores: dict[int, float]) -> None:
        """Links hf and best to their checkpoints and removes those that are not to be kept; best
        is the one with the highest of `scores`, by iteration."""
        done = self.iterations()
        best = max((i for i in done if i in scores), key=scores.__getitem__, default=done[-1])
        self.link("hf", done[-1])
        self.link("best", best)
        for old in done[: -self.keep]:
            if old != best:
                shutil.rmtree(self.path(old))

    def link(self, name: str, iteration: int) -> None:
        """name -> the checkpoint of this iteration; never missing, not even for a moment."""
        link = os.path.join(self.folder, name)
        if os.path.lexists(link + ".tmp"):
            os.remove(link + ".tmp")
        target = os.path.join(self.path(iteration), "hf")
        os.symlink(os.path.relpath(target, self.folder), link + ".tmp")
        os.replace(link + ".tmp", link)


def compare_settings(saved: dict, given: dict) -> str:
    """What differs, "" where nothing does."""
    names = sorted(saved.keys() | given.keys())
    differing = [name for name in names if saved.get(name) != given.get(name)]
    return "; ".join(f"{n} was {saved.get(n)!r}, is {given.get(n)!r}" for n in differing)


def check_shared(folder: str) -> None:
    """Raises UsageError where a rank does not see what rank 0 writes to the folder."""
    probe = ranks.from_main(lambda: tempfile.mkstemp(dir=folder)[1])
    blind = ranks.gather([] if os.path.exists(probe) else [socket.gethostname()])
    if ranks.is_main():
        os.remove(probe)
    require(
        not blind,
        f"--output-dir {folder}: {', '.join(sorted(set(blind)))} does not see what rank 0 writes "
        "there: it must be a folder that all nodes share",
    )


def write_json(path: str, content: dict) -> None:
    with open(path + ".tmp", "w") as file:
        json.dump(content, file, indent=1)
    os.replace(path + ".tmp", path)


def read_json(path: str) -> dict:
    """{} where it is not there, or not JSON any more."""
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def digest_files(folder: str) -> dict[str, str]:
    """{name: SHA-256} of all files below the folder but manifest.json; each rank reads a share."""
    paths = glob.glob(os.path.join(glob.escape(folder), "**"), recursive=True)
    found = [os.path.relpath(path, folder) for path in paths if os.path.isfile(path)]
    names = ranks.from_main(lambda: sorted({*found} - {"manifest.json"}))

    def digest(name: str) -> str:
        with open(os.path.join(folder, name), "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return dict(zip(names, ranks.shared_map(digest, names), strict=True))
