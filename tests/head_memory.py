"""The most memory that log-probs and their gradient take, in MB, for 1,024 response tokens, for
4,096, and for as many whose logits are made at once. Run by the tests, in a process of its own: the
system counts a process's peak only once."""

import resource

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import vineppo

VOCABULARY = 20_000


def main() -> None:
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))

    def peak(tokens: int) -> int:
        ids = torch.randint(VOCABULARY, (tokens // 256, 257))
        prompt_lens, mask = torch.ones(len(ids), dtype=torch.long), torch.ones(len(ids), 256)
        vineppo.compute_logprobs(model, ids, prompt_lens, mask, 0.6).sum().backward()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000

    print(peak(1_024), peak(4_096), end=" ")
    split = torch.Tensor.split
    torch.Tensor.split = lambda tensor, _: split(tensor, 1_000_000)
    print(peak(4_096))


if __name__ == "__main__":
    main()
