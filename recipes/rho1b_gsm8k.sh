#!/usr/bin/env bash
# Rho-1B on GSM8K: bash recipes/rho1b_gsm8k.sh sft, then vineppo and so on,
# as paper.sh says.
NAME=rho1b-gsm8k
BASE=microsoft/rho-math-1b-v0.1
TASK=gsm8k
RANKS="${RANKS:-4}"                   # App. C.8: 4 x A100 80 GB
# official: ZeRO 0; the tokens are ours, an estimate
MEMORY=(--zero-stage 0 --micro-batch-tokens 16384)
GPU_SHARE=0.5                        # vLLM's, while it samples
PPO_SHARE=0.4                        # the same beside a critic
MAX_MODEL_LEN=2048                   # Table 1
NUM_PROBLEMS=7100                    # what is left to train on (docs/real_data.md)
NUM_ITERATIONS=650                   # official
SFT_LEARNING_RATE=1e-5               # official; the paper swept 1e-7 to 1e-4 (C.3)
SFT_STEPS_OF_AN_EPOCH=111
DPO_BETA=0.3                         # Table 3
DPO_SAVE_EVERY=500                   # official
CAP=(--max-steps-valued 25)          # official, for VinePPO on GSM8K; not in the paper
source "$(dirname "$0")/paper.sh" "$@"
