#!/usr/bin/env bash
# Starts tritonserver on this image's model repository; arguments of the container go to tritonserver as they are.
#
#   TRITON_MODEL_CONFIG   which settings of the model: default (config.pbtxt) or the name of a file in llama/configs
#   LLAMA_<SETTING>       read by the model itself; an unknown name makes it refuse to load
set -euo pipefail

root=/srv/triton-llama
# Seconds that tritonserver has on SIGTERM, one budget: first for open connections, idle ones included, then for requests.
exit_timeout=120

config=${TRITON_MODEL_CONFIG:-default}
known=(default)
for file in "$root"/model_repository/llama/configs/*.pbtxt; do
  if [[ -e $file ]]; then known+=("$(basename "$file" .pbtxt)"); fi
done
# Triton falls back to config.pbtxt without a word when the named config has no file.
if [[ " ${known[*]} " != *" $config "* ]]; then
  echo "entrypoint: TRITON_MODEL_CONFIG=$config is unknown; known: ${known[*]}" >&2
  exit 2
fi
# The configs are complete; completing them would start a model process, and import PyTorch, once more before the load.
arguments=(
  --model-repository="$root/model_repository"
  --disable-auto-complete-config
  --exit-timeout-secs="$exit_timeout"
)
if [[ $config != default ]]; then arguments+=(--model-config-name="$config"); fi

# A setting that is set to nothing (LLAMA_MODEL= in .env) means the default, which the model takes for a missing one.
for name in "${!LLAMA_@}"; do
  if [[ -z ${!name} ]]; then unset "$name"; fi
done

exec tritonserver "${arguments[@]}" "$@"
