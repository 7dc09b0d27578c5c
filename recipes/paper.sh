# The paper's settings as commands, sourced by a file that says which model and data:
#
#   bash recipes/rho1b_math.sh sft               the checkpoint that the other seven start from
#   bash recipes/rho1b_math.sh vineppo           or ppo, grpo, rloo, restem, dpo_pos
#   bash recipes/rho1b_math.sh evaluate --model runs/vineppo-rho1b-math/best
#
# from the folder of the clone. What follows goes to the script: --resume auto, --data-dir FOLDER,
# --seed 2 --output-dir runs/vineppo-rho1b-math-seed2. A flag that is not here has the script's
# default, which is the paper's. "Table" and "App." are the paper's; "official" is the code that its
# authors released; "ours" is neither.
#
# Not run by us: there was no GPU. `python -m benchmarks.plan` says what vineppo, ppo, grpo and rloo
# will take of a GPU: PPO on DeepSeekMath-7B, whose critic comes on top, 73.9 GiB, 4 of them assumed.
# (The official run moved optimizer state to the CPU; here only the reference model is there.)
# dpo_pos.py holds the ids of its 736,000 responses on each rank's host, twice: some 2 GB a rank, and as
# much again while a part of them is graded.
set -euo pipefail
: "${TASK:?"this is a part of the other files: run rho1b_math.sh or one like it"}"
METHOD=${1:?"which one? sft, vineppo, ppo, grpo, rloo, restem, dpo_pos or evaluate"}
shift

DATA=(--task "$TASK" --max-model-len "$MAX_MODEL_LEN")
SFT=(
  --model "$BASE"
  --num-epochs 3                           # App. C.3
  --warmup-fraction 0.06                   # App. C.3 (official: 2 epochs, 0.03)
  --learning-rate "$SFT_LEARNING_RATE"
  --batch-size 64                          # App. C.3
  # App. C.3: the best checkpoint on validation, there by accuracy, here by loss, of each epoch's
  --save-every "$SFT_STEPS_OF_AN_EPOCH" --eval-every "$SFT_STEPS_OF_AN_EPOCH" --eval-problems 500
)
SAMPLING=(
  --max-response-len 1024                  # official; a prompt has what is left of MAX_MODEL_LEN
                                           # (official: prompts of up to 1,512 tokens)
  --top-p 0.9                              # official: then sampler and trainer differ a little
  --stop $'\n\n\nProblem:'                 # official
)
RL=(
  --model "runs/sft-$NAME/best"
  --learning-rate 1e-6                     # Tables 1, 2, 3
  --minibatch-size 64                      # Table 1; official for RestEM and DPO-Positive
  --eval-problems 500 --eval-rounds 16     # official: all validation problems, 16 rounds
)
POLICY_GRADIENT=(
  --num-prompts 64                         # Table 1
  --num-iterations "$NUM_ITERATIONS"
  --eval-every 40 --save-every 10          # official: PPO is evaluated, VinePPO saved that often
)
RESTEM=(
  --num-prompts "$NUM_PROBLEMS"            # App. C.6: 8 responses for every problem (that fits)
  --num-iterations 10                      # Table 2
  --eval-every 500                         # Table 2
)
DPO=(
  --num-prompts "$NUM_PROBLEMS"            # App. C.6, Table 3: 64 responses and pairs each
  --beta "$DPO_BETA"
  --eval-every "$DPO_SAVE_EVERY" --save-every "$DPO_SAVE_EVERY"  # official
)
# The authors' reply to the reviewers: on Rho-1B GRPO and RLOO needed a KL coefficient above PPO's
# 1e-4, of those searched in Table 1; it does not say which. DeepSeekMath-7B has no such runs.
HIGHER_KL=(--kl-coef 3e-3)
CRITIC=(--critic-learning-rate 1e-6)       # Table 1 has one learning rate
# vLLM's share of a GPU, ours: in tenths, so that the plan has 5 % of the GPU to spare
SHARE=(--gpu-memory-utilization "$GPU_SHARE")

SCRIPT=("$METHOD.py")
case $METHOD in
  sft) OPTIONS=("${SFT[@]}") ;;
  vineppo)
    OPTIONS=("${RL[@]}" "${SAMPLING[@]}" "${POLICY_GRADIENT[@]}" "${SHARE[@]}" "${CAP[@]}")
    [ ${#CAP[@]} = 0 ] || SCRIPT=(-m experiments.vineppo_cheap) # the fork that has a cap
    ;;
  ppo)
    SHARE=(--gpu-memory-utilization "$PPO_SHARE") # the critic takes some
    OPTIONS=("${RL[@]}" "${SAMPLING[@]}" "${POLICY_GRADIENT[@]}" "${SHARE[@]}" "${CRITIC[@]}")
    # little room is left: holes between tensors should not cost it (docs/engines.md: vLLM's sleep
    # allows for it; not tried on a GPU)
    export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
    ;;
  grpo | rloo)
    OPTIONS=("${RL[@]}" "${SAMPLING[@]}" "${POLICY_GRADIENT[@]}" "${SHARE[@]}" "${HIGHER_KL[@]}")
    ;;
  restem) OPTIONS=("${RL[@]}" "${SAMPLING[@]}" "${SHARE[@]}" "${RESTEM[@]}") ;;
  dpo_pos) OPTIONS=("${RL[@]}" "${SAMPLING[@]}" --gpu-memory-utilization 0.35 "${DPO[@]}") ;;
  evaluate) OPTIONS=("${SAMPLING[@]}") ;;  # 16 rounds at temperature 0.35 are the default
  *)
    echo "error: '$METHOD': sft, vineppo, ppo, grpo, rloo, restem, dpo_pos or evaluate" >&2
    exit 1
    ;;
esac
[ "$METHOD" = evaluate ] || OPTIONS+=("${MEMORY[@]}" --output-dir "runs/$METHOD-$NAME")
[ -f "$METHOD.py" ] || { echo "error: run this from the folder of the clone" >&2; exit 1; }
PATH="$PWD/.venv/bin:$PATH"
# LAUNCH="--nnodes 2 --nproc-per-node 8 ..." has several machines (docs/scale.md)
read -ra LAUNCH <<< "${LAUNCH:---standalone --nproc-per-node $RANKS}"
torchrun "${LAUNCH[@]}" "${SCRIPT[@]}" "${DATA[@]}" "${OPTIONS[@]}" "$@"
