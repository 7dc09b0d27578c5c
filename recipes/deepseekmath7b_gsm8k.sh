#!/usr/bin/env bash
# DeepSeekMath-7B on GSM8K: bash recipes/deepseekmath7b_gsm8k.sh sft, then vineppo and so on,
# as paper.sh says.
NAME=deepseekmath7b-gsm8k
BASE=deepseek-ai/deepseek-math-7b-base  # where its weights are pickles (.bin) only, `sft` says so and
                                     # wants --trust-remote-code; what it writes is safetensors
TASK=gsm8k
RANKS="${RANKS:-8}"                   # App. C.8: 8 x H100 80 GB
# official: ZeRO 2; the tokens are ours, an estimate
MEMORY=(--zero-stage 2 --micro-batch-tokens 4096)
GPU_SHARE=0.5                        # vLLM's, while it samples
PPO_SHARE=0.3                        # the same beside a critic
MAX_MODEL_LEN=2500                   # Table 1
NUM_PROBLEMS=7100                    # what is left to train on (docs/real_data.md)
NUM_ITERATIONS=650                   # official
SFT_LEARNING_RATE=5e-5               # official; the paper swept 1e-7 to 1e-4 (C.3)
SFT_STEPS_OF_AN_EPOCH=111
DPO_BETA=0.3                         # Table 3
DPO_SAVE_EVERY=450                   # official
CAP=(--max-steps-valued 25)          # official, for VinePPO on GSM8K; not in the paper
source "$(dirname "$0")/paper.sh" "$@"
