#!/usr/bin/env bash
# A run of perf/gpu on a machine without a package index: unpacks what `python -m gpu.pack` has packed, then runs
# `python3 -m gpu` with the arguments. Results are written to $OUT, also while it runs.
#
#   bash perf/gpu/elsewhere.sh --budget 8
#   TRITON=1 bash perf/gpu/elsewhere.sh --only article --resume     with the server, if it came along (--triton)
#
# .work/gpu/gpu.json is what --resume goes on with: it came along, or is what the run before has left here. Unpacks into
# the Python that is on PATH: for a machine that is thrown away afterwards.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${OUT:?OUT is the folder for the results}"
packed=.work/gpu
site=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
stamp="$site/.unpacked-by-perf-gpu"

unpack() { # archive
  # What is there in another version goes first, or files of both would lie in one folder.
  tar -tf "$1" | cut -d/ -f1 | sort -u | while read -r top; do
    case $top in
      cache) ;;
      *.dist-info) rm -rf "$site/${top%%-[0-9]*}"-[0-9]*.dist-info ;;
      *) rm -rf "${site:?}/$top" ;;
    esac
  done
  tar -xf "$1" -C "$site"
}

if [[ -f $packed/site.tar.gz && ! -e $stamp-site ]]; then
  unpack "$packed/site.tar.gz"
  touch "$stamp-site"
fi
if [[ -n ${TRITON:-} && ! -e $stamp-triton ]]; then
  unpack "$packed/numpy.tar.xz"
  unpack .work/gpu-triton/triton.tar.xz
  touch "$stamp-triton"
fi
if [[ -n ${TRITON:-} ]]; then
  export TRITON_LLAMA_CACHE="$site/cache"
fi
[[ ! -f $packed/gpu.json ]] || cp "$packed/gpu.json" "$OUT/gpu.json"
# Whole paths: a server that is started may have another working folder.
for folder in deploy/supervisor deploy/local client tests perf model_repository/llama/1; do
  export PYTHONPATH="$PWD/$folder${PYTHONPATH:+:$PYTHONPATH}"
done
export PYTHONUNBUFFERED=1 TRANSFORMERS_OFFLINE=1 HF_HUB_OFFLINE=1
code=0
python3 -m gpu --output "$OUT/gpu.json" --partial "$OUT" "$@" || code=$?
[[ ! -f $OUT/gpu.json ]] || cp "$OUT/gpu.json" "$packed/gpu.json"
exit "$code"
