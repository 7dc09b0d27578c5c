"""How much do vLLM's prefix cache, sharing and the order of requests save in rollouts?

    python -m benchmarks.rollouts                    the embedded model; a minute or two

One engine, and the states of one iteration's responses. Schemes take turns, so that a busy machine
slows all of them. Printed are medians over the turns.
"""

import random
import statistics
import time

import tyro

import vineppo
from common import data, engines, ranks, sampling, steps


def main(
    model: str = "runs/sft/hf",
    task: str = "chain",
    data_dir: str = "",
    max_model_len: int = vineppo.Args.max_model_len,
    max_response_len: int = vineppo.Args.max_response_len,
    num_prompts: int = vineppo.Args.num_prompts,
    group_size: int = vineppo.Args.group_size,
    turns: int = 5,
) -> None:
    ranks.set_up()
    args = vineppo.Args(model=model, max_model_len=max_model_len, max_response_len=max_response_len)
    problems = data.load_problems(task, "train", data_dir)
    tokenizer = engines.load_tokenizer(args)
    _, prompts = data.fit(args, problems, tokenizer)
    sampler = sampling.Sampler(args, tokenizer)
    import vllm

    sampling_params = vllm.SamplingParams

    def generate(states, k, cache=True):
        """(seconds, tokens); `states` (prompt ids, response ids)."""
        if not cache:
            vllm.SamplingParams = lambda **options: sampling_params(
                **options, skip_reading_prefix_cache=True
            )
        sampler.llm.reset_prefix_cache()
        start = time.perf_counter()
        groups = sampler.generate(
            [prompt + prefix for prompt, prefix in states],
            n=k,
            max_tokens=[max_response_len - len(prefix) for _, prefix in states],
            temperature=args.temperature,
            seed=(1,),
        )
        vllm.SamplingParams = sampling_params
        seconds = time.perf_counter() - start
        return seconds, sum(len(sample.ids) for group in groups for sample in group)

    prompts = prompts[:num_prompts]
    limits = [max_response_len] * len(prompts)
    groups = sampler.generate(prompts, group_size, limits, args.temperature, seed=(0,))
    states = []
    for prompt, group in zip(prompts, groups, strict=True):
        for sample in group:
            ends = steps.split_steps(sample.ids, tokenizer, data.TASKS[task].step_rule)
            states += [(prompt, sample.ids[:start]) for start in [0, *ends[:-1]]]
    unique = list({(*prompt, *prefix): (prompt, prefix) for prompt, prefix in states}.values())
    shuffled = random.Random(0).sample(unique, len(unique))
    schemes = {
        "K 9 for every state, no prefix cache": (states, 9, False),
        "K 9 for every state": (states, 9),
        "K 9, equal prefixes once, shuffled": (shuffled, 9),
        "K 9, equal prefixes once (the script's)": (unique, 9),
        "K 3": (unique, 3),
        "K 2": (unique, 2),
        "K 1": (unique, 1),
    }
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in schemes}
    for turn in range(turns + 1):
        for name, scheme in schemes.items():
            one = generate(*scheme)
            found[name] += [one] * (turn > 0)  # the first turn warms up
    first = [seconds for seconds, _ in next(iter(found.values()))]
    print(f"{len(states)} states, {len(unique)} different ones\n")
    print("| scheme | seconds | of the first | tokens | tokens/s |")
    print("|---|---|---|---|---|")
    for name, runs in found.items():
        seconds = statistics.median(s for s, _ in runs)
        ratio = statistics.median(s / f for (s, _), f in zip(runs, first, strict=True))
        tokens = runs[0][1]
        print(f"| {name} | {seconds:.2f} | {ratio:.2f} | {tokens:,} | {tokens / seconds:,.0f} |")


if __name__ == "__main__":
    tyro.cli(main)
