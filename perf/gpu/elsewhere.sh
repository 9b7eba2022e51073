#!/usr/bin/env bash
# A run of perf/gpu on a machine without a package index: unpacks what `python -m perf.gpu.pack` has packed, tests the
# kernels, then runs `python3 -m perf.gpu` with the arguments. Results are written to $OUT, also while it runs.
#
#   bash perf/gpu/elsewhere.sh --budget 7     the first one on a machine: unpacking and testing take up to 2.5 minutes
#   TRITON=1 bash perf/gpu/elsewhere.sh --only article --resume     with the server, if it came along (--triton)
#
# .work/gpu/gpu.json is what --resume goes on with: it came along, or is what the run before has left here, if only as
# far as it came. Of a run that was killed together with this script there is $OUT/gpu-*.json alone: to go on with it,
# bring it along as .work/gpu/gpu.json. Unpacks into the Python that is on PATH: for a machine that is thrown away
# afterwards.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
: "${OUT:?OUT is the folder for the results}"
packed=.work/gpu
site=$(python3 -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
stamp="$site/.unpacked-by-perf-gpu"
tested="$site/.tested-by-perf-gpu"

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

# In a process of its own, because one whose kernel has failed badly can't use the GPU any more. What comes of it is for
# people to judge: the run goes on.
test_kernels() {
  local code=0 workers=()
  if ! python3 -c "import pytest" >/dev/null 2>&1; then
    echo "tests/kernels: not run, this Python has no pytest"
    return
  fi
  # Nearly all of their time is the compiler's, on one core a process.
  ! python3 -c "import xdist" >/dev/null 2>&1 || workers=(-n 8)
  # Interrupted, pytest still says what it has found. Other versions of libraries warn of other things.
  timeout --signal=INT --kill-after=10 120 python3 -m pytest -q -W default "${workers[@]}" tests/kernels \
    >"$OUT/kernels.log" 2>&1 || code=$?
  touch "$tested"
  case $code in
    0) echo "tests/kernels: passed: $(tail -n 1 "$OUT/kernels.log")" ;;
    124) echo "tests/kernels: NOT DONE in 120 s, see kernels.log: $(tail -n 1 "$OUT/kernels.log")" ;;
    *) echo "tests/kernels: NOT PASSED (exit code $code), see kernels.log: $(tail -n 1 "$OUT/kernels.log")" ;;
  esac
}

# Of a run that didn't get to its end there is only the partial file.
keep() {
  local file
  for file in "$OUT"/gpu.json "$OUT"/gpu-*.json; do
    # Whether that works or not, the exit code is the run's.
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
# Whole paths: a server that is started may have another working folder.
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
  # A kernel has broken the GPU for its process. What is still missing, in another one, without kernels of our own, and
  # within ten minutes for all of it.
  code=0
  python3 -m perf.gpu --output "$OUT/gpu.json" --partial "$OUT" "$@" --resume --kernels stock --budget "$left" || code=$?
fi
exit "$code"
