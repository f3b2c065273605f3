# The training data of a preset; sourced by common.sh.

# Sets DATA_PATH, TOKENIZER_ARGS and DATA_KIND: given | corpus | synthetic.
settle_data() {
    DATA_KIND=given
    if [[ -z ${DATA_PATH:-} ]]; then
        refuse_given "has an effect only with DATA_PATH, which is not set; set DATA_PATH, or leave this out" \
            TOKENIZER_TYPE TOKENIZER_MODEL VOCAB_FILE MERGE_FILE
        if [[ $MODEL == tiny ]]; then
            DATA_KIND=corpus
            DATA_PATH=$WORK_DIR/data/corpus_text_document
            TOKENIZER_TYPE=GPTSentencePieceTokenizer
            TOKENIZER_MODEL=$WORK_DIR/data/tokenizer.model
        else
            DATA_KIND=synthetic
            DATA_PATH=$WORK_DIR/data/synthetic_document
            TOKENIZER_TYPE=NullTokenizer
        fi
    fi
    settle_tokenizer
}

settle_tokenizer() {
    if [[ -z ${TOKENIZER_TYPE:-} ]]; then
        if [[ -n ${TOKENIZER_MODEL:-} ]]; then
            TOKENIZER_TYPE=GPTSentencePieceTokenizer
        elif [[ -n ${VOCAB_FILE:-} ]]; then
            TOKENIZER_TYPE=GPT2BPETokenizer
        else
            TOKENIZER_TYPE=NullTokenizer
        fi
    fi
    TOKENIZER_ARGS=(--tokenizer-type "$TOKENIZER_TYPE")
    [[ -z ${TOKENIZER_MODEL:-} ]] || TOKENIZER_ARGS+=(--tokenizer-model "$TOKENIZER_MODEL")
    [[ -z ${VOCAB_FILE:-} ]] || TOKENIZER_ARGS+=(--vocab-file "$VOCAB_FILE")
    [[ -z ${MERGE_FILE:-} ]] || TOKENIZER_ARGS+=(--merge-file "$MERGE_FILE")
    if [[ $TOKENIZER_TYPE == NullTokenizer ]]; then
        # One more id ends documents: with it, the vocabulary has the 50257 tokens of GPT-2's.
        : "${VOCAB_SIZE:=$([[ $MODE == scaled ]] && echo 1023 || echo 50256)}"
    fi
    [[ -z ${VOCAB_SIZE:-} ]] || TOKENIZER_ARGS+=(--vocab-size "$VOCAB_SIZE")
}

prepare_data() {
    case $DATA_KIND in
    corpus) prepare_corpus ;;
    synthetic) prepare_synthetic ;;
    esac
}

# Runs a tool of this repository in the current directory, so that relative paths stay valid.
run_tool() { PYTHONSAFEPATH=1 PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} "$(python_path)" -m "$@"; }

prepare_corpus() {
    local data=$WORK_DIR/data
    run_tool megatron_restart_tools.build_corpus --output-dir "$data" || die "could not build the corpus in $data"
    if [[ -f $DATA_PATH.idx && $DATA_PATH.idx -nt $data/corpus.jsonl && $DATA_PATH.idx -nt $TOKENIZER_MODEL ]]; then
        say "dataset $DATA_PATH exists"
        return
    fi
    say "tokenizing the corpus"
    run_tool megatron_restart_tools.preprocess_data --input "$data/corpus.jsonl" --output-prefix "$data/corpus" \
        --tokenizer-type "$TOKENIZER_TYPE" --tokenizer-model "$TOKENIZER_MODEL" \
        --append-eod --document-sizes exact --workers 2 >&2 || die "could not tokenize $data/corpus.jsonl"
}

# Enough tokens for all iterations; the training part of the split is 94.9 %.
prepare_synthetic() {
    local tokens=$(((ITERS * GLOBAL_BATCH + 1) * (SEQ_LENGTH + 1) * 12 / 10))
    run_tool megatron_restart_tools.make_synthetic_dataset --output-prefix "$DATA_PATH" --tokens "$tokens" \
        --vocab-size "$VOCAB_SIZE" || die "could not write $DATA_PATH"
}
