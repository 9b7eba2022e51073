#!/usr/bin/env bash
# Puts Debian's kubectl under FOLDER/usr/bin, beside the system and not into it:  fetch-kubectl.sh FOLDER
# From Debian 13's package kubectl; Debian 12's kubernetes-client is too old for today's kustomize files.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
sources=/etc/apt/sources.list.d/debian.sources
if [[ ! -e $sources ]]; then
  echo "this isn't a Debian with $sources: install kubectl or kustomize" >&2
  exit 1
fi
mkdir -p "$folder"/apt/{lists,cache,parts}
awk 'BEGIN { RS = "" } NR == 1' "$sources" | sed -E 's/^Suites:.*/Suites: trixie/' >"$folder/apt/next.sources"
apt=(apt-get -qq -o "Dir::Etc::sourcelist=$folder/apt/next.sources" -o "Dir::Etc::sourceparts=$folder/apt/parts"
  -o "Dir::State::lists=$folder/apt/lists" -o "Dir::Cache=$folder/apt/cache" -o APT::Sandbox::User=root)
"${apt[@]}" update
(cd "$folder/apt" && "${apt[@]}" download kubectl/trixie)
dpkg-deb --extract "$folder"/apt/kubectl_*.deb "$folder"
"$folder/usr/bin/kubectl" version --client >/dev/null
