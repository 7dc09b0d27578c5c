"""Runs in TRL's own environment (benchmarks/against_trl.py makes it): GRPOTrainer on the CPU with
transformers' generate. Prints the seconds of each iteration, of its sampling, and the mean response
length of each."""

import itertools
import json
import re
import sys
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def main(job: dict) -> None:
    steps = job["update_epochs"] * job["num_responses"] // job["minibatch_size"]  # an iteration
    config = GRPOConfig(
        output_dir=job["folder"],
        per_device_train_batch_size=job["minibatch_size"],
        gradient_accumulation_steps=1,
        steps_per_generation=job["num_responses"] // job["minibatch_size"],
        num_generations=job["group_size"],
        num_iterations=job["update_epochs"],
        max_steps=steps * job["num_iterations"],
        max_completion_length=job["max_response_len"],
        temperature=job["temperature"],
        learning_rate=job["learning_rate"],
        beta=job["kl_coef"],
        shuffle_dataset=False,
        # its defaults would be slower here: bfloat16, and activations computed twice
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
    )
    ends: list[float] = [time.perf_counter()]
    sampling: list[float] = []
    lengths: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            if state.global_step % steps == 0:
                ends.append(time.perf_counter())

        def on_log(self, args, state, control, logs=None, **_):
            if "completions/mean_length" in logs:  # once a generation
                lengths.append(logs["completions/mean_length"])

    def reward(completions, answer, **_):
        found = [re.findall(r"####\s*(-?[\d.,]+)", text) for text in completions]
        return [float(bool(f) and f[-1] == a) for f, a in zip(found, answer, strict=True)]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": job["prompts"], "answer": job["answers"]}),
        callbacks=[Clock()],
    )
    generate = trainer._generate_single_turn

    def timed(*arguments, **options):
        start = time.perf_counter()
        found = generate(*arguments, **options)
        sampling.append(time.perf_counter() - start)
        return found

    trainer._generate_single_turn = timed
    trainer.train()
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    print("TRL " + json.dumps({"seconds": seconds, "sampling": sampling, "length": lengths}))


if __name__ == "__main__":
    main(json.loads(sys.stdin.read()))
