# LLaMA-style in miniature: eight ranks on two CPU cores do an iteration in well under a second.
HIDDEN_SIZE=128
FFN_HIDDEN_SIZE=344
NUM_LAYERS=4
NUM_ATTENTION_HEADS=4
NUM_KEY_VALUE_HEADS=2
RUNS_ON_CPU=1
: "${SEQ_LENGTH:=128}" "${MICRO_BATCH:=2}" "${ITERS:=12}" "${SAVE_INTERVAL:=5}"
: "${GLOBAL_BATCH:=$((MICRO_BATCH * DP * 2))}" # two micro batches, so that the pipeline overlaps
: "${WORK_DIR:=$ROOT/runs/tiny}"
