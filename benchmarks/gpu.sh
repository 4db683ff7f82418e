#!/usr/bin/env bash
# What only a GPU can tell, in rounds of under ten minutes each. Nothing is fetched: networks get random weights, packages
# that are missing come from wheels/.
#
#   benchmarks/gpu.sh pack           on a machine with a network: puts the wheels for Python 3.12 on Linux into wheels/
#   benchmarks/gpu.sh [OUT]          round 1: are the kernels right, and how fast; SD 2.1 with them, without, in two passes;
#                                    the plan of its memory; SDXL; an update that encodes images; compiled blocks
#   benchmarks/gpu.sh --round 2 [OUT]    SD 1.5, each speed setting before and after, encoding, diffusers' examples beside ours
#   benchmarks/gpu.sh --round 3 [OUT]    the stages of Stable Cascade
#   benchmarks/gpu.sh --dry [OUT]    all rounds on the CPU with tiny twins, to see that they run to their end
#   benchmarks/gpu.sh --only 'cascade*' [OUT]    the parts with such names alone, of whatever round; also after --dry
#
# The wheels folder is not in git: it must travel to the machine with the tree, or nothing that is missing there is found.
# OUT (default: gpu-round) gets three files, gpu.json (all that was measured), gpu.txt (the table) and gpu.log; where only
# one folder comes back from the machine, OUT is that folder. Whatever ends a round, they hold what was measured by then.
# Each round begins with the smallest part, whose kernels are compiled then (up to a minute, on the second round seconds).
#
# torch, numpy, transformers, tokenizers, safetensors, huggingface_hub, pyarrow and xxhash must be there; torch is never
# moved. PYTHON=python3.12 chooses the interpreter. Rows that ran out of memory, or did not agree with the others, say so.
set -u -o pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
MOST_MIB=48
MOST_SECONDS=570  # of a round: budgets of its parts are less, the rest is for starting them

WHEELS="diffusers omegaconf antlr4-python3-runtime pydantic pydantic_core annotated-types typing-inspection simplejpeg
obstore braceexpand boto3 botocore s3transfer jmespath importlib_metadata zipp pillow
python-dateutil six peft"

pack() {
    rm -rf wheels && mkdir wheels
    local platforms=() name pinned
    for name in 2_34 2_31 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${name}_x86_64"); done
    platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
    for name in $WHEELS; do
        pinned=$(grep -i -E "^${name//[-_]/[-_]}==" constraints.txt) || { echo "constraints.txt does not pin $name"; exit 2; }
        "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
            "${platforms[@]}" -d wheels -c constraints.txt "$pinned" || { echo "there is no wheel of $pinned"; exit 1; }
    done
    local mib; mib=$(du -sm wheels | cut -f1)
    du -k wheels/*.whl | sort -n
    [ "$mib" -le "$MOST_MIB" ] || { echo "wheels/ takes $mib MiB, more than $MOST_MIB"; exit 1; }
    echo "wheels/ takes $mib MiB"
}

if [ "${1:-}" = pack ]; then pack; exit; fi
ROUND=1; ONLY=
DRY=0; if [ "${1:-}" = --dry ]; then DRY=1 ROUND='*' MOST_SECONDS=3600; shift; fi  # time does not matter there
if [ "${1:-}" = --round ]; then ROUND=$2; shift 2; fi
if [ "${1:-}" = --only ]; then ROUND='*' ONLY=$2; shift 2; fi
OUT=$(mkdir -p "${1:-gpu-round}" && cd "${1:-gpu-round}" && pwd) || exit 2
rm -f "$OUT"/gpu.{json,txt,log}
OWN=$(mktemp -d); trap 'rm -rf "$OWN"' EXIT
PARTS=$OWN/parts; mkdir "$PARTS"
export PYTHONPATH="$PWD/src" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
BEGAN=$SECONDS
CHILD= IN=
: >"$OUT/gpu.log"

# What `bench` imports, and a network of transformers by name: it imports the rest only when it is asked for.
there() { "$PYTHON" -c "import daguerre.cli.bench; from transformers import CLIPTextModel"; }
if ! there 2>/dev/null; then
    ls wheels/*.whl >/dev/null 2>&1 || { there; echo "and there is no wheels/ to take it from: run benchmarks/gpu.sh pack (torch it does not pack)"; exit 2; }
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$OWN/site" wheels/*.whl || exit 2
    PYTHONPATH="$PYTHONPATH:$OWN/site"
    there || { echo "that is what $("$PYTHON" -V) lacks beside wheels/, which are for Python 3.12 on x86-64"; exit 2; }
fi

# table: what there is so far as gpu.json and gpu.txt.
table() { "$PYTHON" benchmarks/gpu_table.py "$PARTS" "$OUT/gpu.json" $((SECONDS - BEGAN)) >"$OUT/gpu.txt"; }
finish() { table; cat "$OUT/gpu.txt"; rm -rf "$OWN"; }
stop() {
    [ -z "$CHILD" ] || { kill -TERM "$CHILD"; wait "$CHILD"; } 2>/dev/null  # it writes what it has
    exit "$1"
}
trap finish EXIT
trap 'stop 143' TERM
trap 'stop 130' INT

# wanted NAME : whether this part is of what was asked for.
wanted() {
    # shellcheck disable=SC2053  # patterns
    [[ $1 == smoke || ($IN == $ROUND && $1 == ${ONLY:-*}) ]]
}

# measure NAME SECONDS PROGRAM... : one part of the round. It ends itself within its budget; timeout is the last resort.
# Of settings that are given twice the last one counts.
measure() {
    local name=$1 seconds=$2 left=$((MOST_SECONDS - SECONDS + BEGAN)) limit word code; shift 2
    wanted "$name" || return 0
    [ $DRY = 0 ] || seconds=300
    [ "$seconds" -le $((left - 20)) ] || seconds=$((left - 20))
    [ "$seconds" -ge 10 ] || { echo "$name: no time is left for it"; return; }
    limit=$((seconds + 30 < left ? seconds + 30 : left))
    local -A given=(); local words=()
    for word in "$@" "budget_seconds=$seconds" "out=$PARTS/$name.json" "${ALL[@]}"; do
        if [[ "$word" == [a-z]*=* ]]; then given[${word%%=*}]=$word; else words+=("$word"); fi
    done
    echo "$name ($seconds s at most)"
    echo "== $name: ${words[*]} ${given[*]}" >>"$OUT/gpu.log"
    timeout -k 10 $limit "${words[@]}" "${given[@]}" >>"$OUT/gpu.log" 2>&1 &
    CHILD=$!
    wait $CHILD
    code=$?
    CHILD=
    table
    if [ $code -ne 0 ]; then
        echo "  exit code $code; the end of its log:"
        tail -n 4 "$OUT/gpu.log" | cut -c1-300 | sed 's/^/    /'
    fi
}

bench() { local name=$1 seconds=$2; shift 2; measure "$name" "$seconds" "$PYTHON" -m daguerre bench "$@"; }
peers() { local name=$1 seconds=$2; shift 2; measure "$name" "$seconds" "$PYTHON" benchmarks/peers.py "$@"; }
# plan NAME RECIPE... : the memory that is predicted for a part; the table puts what it took beside it.
plan() {
    local name=plan-$1; shift
    wanted "$name" || return 0
    [ $((MOST_SECONDS - SECONDS + BEGAN)) -ge 60 ] || { echo "$name: no time is left for it"; return; }
    echo "$name"
    timeout -k 5 50 "$PYTHON" -m daguerre plan "$@" "${PLANNED[@]}" --json >"$PARTS/$name.json" 2>>"$OUT/gpu.log" ||
        { rm -f "$PARTS/$name.json"; echo "  it failed: gpu.log"; }
    table
}
batch() { echo "training.global_batch_size=$1 training.per_device_batch_size=$1 training.gradient_checkpointing=false"; }

ALL=(training.device=cuda); PLANNED=("${ALL[@]}"); SD15=sd15; SD21=sd21; SDXL=sdxl
if [ $DRY = 1 ]; then
    PYTHONPATH="$PYTHONPATH:tests/support" "$PYTHON" - "$OWN" >>"$OUT/gpu.log" 2>&1 <<'PY' || exit 2
import sys
from pathlib import Path
from tiny_cascade import EFFNET, PREVIEWER, write_decoder, write_prior
from tiny_models import write_sd, write_sdxl
place = Path(sys.argv[1])
for folder in (write_prior(place / "cascade_c"), write_prior(place / "cascade_c_1b"), write_decoder(place / "cascade_b")):
    (folder / "effnet.safetensors").symlink_to(EFFNET); (folder / "previewer.safetensors").symlink_to(PREVIEWER)
write_sd(place / "sd15"); write_sd(place / "sd21", version=2); write_sdxl(place / "sdxl")
PY
    ALL=(rounds=1 turn_seconds=.01 soak_seconds=0 training.device=cpu data.resolution=32 $(batch 2))
    PLANNED=(training.device=cpu data.resolution=32 $(batch 2))
fi
base() {
    [ $DRY = 1 ] || return
    echo "pretrained_model_name_or_path=$OWN/$1"
    case $1 in
        cascade_c*) echo "model.prior=base model.effnet=$OWN/$1/effnet.safetensors model.previewer=$OWN/$1/previewer.safetensors" ;;
        cascade_b) echo "model.decoder=base model.effnet=$OWN/$1/effnet.safetensors" ;;
    esac
}

# What cannot do this cannot do the rest.
bench smoke 90 $SD15 $(base sd15) data.resolution=256 $(batch 2) rounds=1 turn_seconds=.5 soak_seconds=0
grep -qs samples_per_second "$PARTS/smoke.json" || { echo "not even the smallest part gave a number"; exit 1; }

IN=1  # The soak of the first part is that of all. What compiles comes last: it may take all of its budget.
measure kernels 60 "$PYTHON" benchmarks/gpu_kernels.py
bench sd21-512 150 $SD21 $(base sd21) data.resolution=512 $(batch 64) soak_seconds=60 rounds=4 \
    'variants={auto: [], plain: [training.kernels=plain, training.channels_last=false], two-pass: [optimizer.one_pass=false]}'
plan sd21-512 $SD21 $(base sd21) data.resolution=512 $(batch 64)
bench sdxl-1024 70 $SDXL $(base sdxl) data.resolution=1024 $(batch 8) ema.enabled=true soak_seconds=3 rounds=4
bench sd15-512-online 50 $SD15 $(base sd15) data.resolution=512 $(batch 32) soak_seconds=2 rounds=3 inputs=pixels \
    'variants={float32: [], bf16: [training.frozen_precision=bf16]}'
bench sd15-256-compiled 80 $SD15 $(base sd15) data.resolution=256 $(batch 64) soak_seconds=2 rounds=4 turn_seconds=1 \
    training.attention=fused 'variants={fused: [], compiled: [training.compile=blocks]}'

IN=2
bench sd15-512 65 $SD15 $(base sd15) data.resolution=512 $(batch 64) soak_seconds=30 rounds=5
bench sd15-256 70 $SD15 $(base sd15) data.resolution=256 $(batch 64) soak_seconds=3 rounds=6 turn_seconds=1 \
    'variants={auto: [], all-off: [training.kernels=plain, training.channels_last=false, training.attention=fused, optimizer.one_pass=false], kernels-plain: [training.kernels=plain, training.channels_last=false], attention-fused: [training.attention=fused], two-pass: [optimizer.one_pass=false]}'
bench sdxl-1024-checkpointed 35 $SDXL $(base sdxl) data.resolution=1024 $(batch 8) ema.enabled=true soak_seconds=3 \
    rounds=5 'variants={base: [training.gradient_checkpointing=true]}'
bench vae-512 20 $SD15 $(base sd15) part=encode data.resolution=512 $(batch 32) soak_seconds=2 rounds=4 turn_seconds=1 \
    'variants={bf16: [training.frozen_precision=bf16], float32: []}'
peers sd15-512-default 50 $SD15 $(base sd15) data.resolution=512 $(batch 32) soak_seconds=0 rounds=6 turn_seconds=2 \
    peers=diffusers-default
peers sd15-lora-512 25 ${SD15}_lora $(base sd15) data.resolution=512 $(batch 8) soak_seconds=0 rounds=4 turn_seconds=1 \
    peers=diffusers-default
peers sd15-controlnet-512 25 ${SD15}_controlnet $(base sd15) data.resolution=512 $(batch 8) soak_seconds=0 rounds=4 \
    turn_seconds=1 peers=diffusers-default
bench sdxl-lora-1024 25 ${SDXL}_lora $(base sdxl) data.resolution=1024 $(batch 1) soak_seconds=2 rounds=4 turn_seconds=1 \
    'variants={bf16: [], int8: [training.base_precision=int8]}'
peers sd15-512-best 55 $SD15 $(base sd15) data.resolution=512 $(batch 32) soak_seconds=0 rounds=5 turn_seconds=2 \
    peers=diffusers-best

IN=3  # 24 x 24 cells of 768 px
square() { echo "data.path=x data.buckets.aspects=square data.resolution=768"; }
bench cascade-c-768 90 cascade_c $(base cascade_c) $(square) $(batch 16) soak_seconds=30 rounds=5
bench cascade-c-1b-768 60 cascade_c_1b $(base cascade_c_1b) $(square) $(batch 32) soak_seconds=3 rounds=5
peers cascade-c-default 60 cascade_c_1b $(base cascade_c_1b) $(square) $(batch 16) soak_seconds=0 rounds=4 \
    turn_seconds=1 peers=diffusers-default
peers cascade-b-default 60 cascade_b_700m $(base cascade_b) data.path=x objective.weighting.name=p2 $(batch 4) \
    soak_seconds=0 rounds=4 turn_seconds=1 peers=diffusers-default
