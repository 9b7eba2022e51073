#!/usr/bin/env bash
# A GPU run on a machine without a package index: unpacks the archives of `python -m perf.gpu.pack`, tests the
# kernels, then runs `python3 -m perf.gpu` with the arguments. Results are written to $OUT, also while it runs.
#
#   bash perf/gpu/elsewhere.sh --budget 7     the first one on a machine: unpacking and testing take up to 2.5 minutes
#   TRITON=1 bash perf/gpu/elsewhere.sh --only article --resume     with the server, if it came along (--triton)
#
# --resume continues with .work/gpu/gpu.json: packed with the archives, or left by the run before, complete or not. A
# run that was killed together with this script leaves only $OUT/gpu-*.json: to continue it, copy that file to
# .work/gpu/gpu.json. Unpacks into the Python on PATH: for a disposable machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${OUT:?OUT is the folder for the results}"
packed=.work/gpu
site=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
stamp="$site/.unpacked-by-perf-gpu"
tested="$site/.tested-by-perf-gpu"

unpack() { # archive
  # Other versions are removed first, or files of both would share a folder.
  tar -tf "$1" | cut -d/ -f1 | sort -u | while read -r top; do
    case $top in
      cache) ;;
      *.dist-info) rm -rf "$site/${top%%-[0-9]*}"-[0-9]*.dist-info ;;
      *) rm -rf "${site:?}/$top" ;;
    esac
  done
  tar -xf "$1" -C "$site"
}

# In a process of its own, which a broken kernel may leave unable to use the GPU. The run continues in any case.
test_kernels() {
  local code=0 workers=()
  if ! python3 -c "import pytest" >/dev/null 2>&1; then
    echo "tests/kernels: not run, this Python has no pytest"
    return
  fi
  # Nearly all of the time is the compiler's, on one core per process.
  ! python3 -c "import xdist" >/dev/null 2>&1 || workers=(-n 8)
  # An interrupted pytest still prints its results. Other library versions emit other warnings.
  timeout --signal=INT --kill-after=10 120 python3 -m pytest -q -W default "${workers[@]}" tests/kernels \
    >"$OUT/kernels.log" 2>&1 || code=$?
  touch "$tested"
  case $code in
    0) echo "tests/kernels: passed: $(tail -n 1 "$OUT/kernels.log")" ;;
    124) echo "tests/kernels: NOT DONE in 120 s, see kernels.log: $(tail -n 1 "$OUT/kernels.log")" ;;
    *) echo "tests/kernels: NOT PASSED (exit code $code), see kernels.log: $(tail -n 1 "$OUT/kernels.log")" ;;
  esac
}

# An incomplete run has only the partial file.
keep() {
  local file
  for file in "$OUT"/gpu.json "$OUT"/gpu-*.json; do
    # The exit code stays the run's.
    [[ ! -d $packed || ! -f $file ]] || cp "$file" "$packed/gpu.json" || true
  done
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
# Absolute paths: a server may have another working folder.
for folder in deploy/supervisor deploy/local client tests . model_repository/llama/1; do
  export PYTHONPATH="$PWD/$folder${PYTHONPATH:+:$PYTHONPATH}"
done
export PYTHONUNBUFFERED=1 TRANSFORMERS_OFFLINE=1 HF_HUB_OFFLINE=1
[[ -e $tested ]] || test_kernels
trap keep EXIT
code=0
python3 -m perf.gpu --output "$OUT/gpu.json" --partial "$OUT" "$@" || code=$?
left=$((9 - SECONDS / 60))
if [[ $code == 3 && $left -gt 0 ]]; then
  # A kernel broke the GPU for that process: measure the rest in a new one with stock kernels, within ten minutes in all.
  code=0
  python3 -m perf.gpu --output "$OUT/gpu.json" --partial "$OUT" "$@" --resume --kernels stock --budget "$left" || code=$?
fi
exit "$code"
