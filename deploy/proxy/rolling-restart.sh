#!/usr/bin/env bash
# Restarts the replicas of the server one after the other, without losing a request of those that come through a proxy:
# each is told to stop, answers what it has accepted, starts again, and is healthy before the next one's turn.
#
#   rolling-restart.sh              the same containers again: the same image, the same environment
#   rolling-restart.sh --recreate   new containers in their place: the image and the environment that compose has now
#
# Works on the compose project that COMPOSE_FILE, COMPOSE_PROJECT_NAME and .env say, as docker compose itself does.
# Exit code 1 if a replica wasn't healthy to begin with, cut off a request, or didn't come back; 2 for other arguments.
set -euo pipefail
cd "$(dirname "$0")/../.."
service=server
# Seconds that a replica may take to become healthy again: as long as compose's start_period.
patience=1800

say() { echo "rolling-restart: $*"; }
about() { docker inspect --format "{{$2}}" "$1"; }
is_healthy() { [[ $(about "$1" .State.Health.Status) == healthy ]]; }

start_again() {
  docker start "$1" >/dev/null
  local deadline=$((SECONDS + patience))
  until is_healthy "$1"; do
    if ((SECONDS > deadline)); then return 1; fi
    sleep 1
  done
}

# Compose makes the one that is missing, and leaves the others as they are, although they are of the old image.
make_another() {
  docker rm "$1" >/dev/null &&
    docker compose --progress quiet up --detach --wait --wait-timeout "$patience" --no-deps --no-recreate \
      --scale "$service=${#replicas[@]}" "$service"
}

case "$*" in
  '') renew=start_again ;;
  --recreate) renew=make_another ;;
  *) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

# Made without compose.proxy.yml (COMPOSE_FILE isn't set, say), a replica has no port where a proxy sees that it is ready.
if [[ $renew == make_another ]] && ! docker compose config "$service" | grep 'TRITON_READY_PORT: "\?[0-9]' >/dev/null; then
  say "compose's files give $service no TRITON_READY_PORT, so no proxy would find a new replica; is COMPOSE_FILE set?" >&2
  exit 1
fi
mapfile -t replicas < <(docker compose ps --all --quiet "$service")
if ((${#replicas[@]} < 2)); then
  say "$service has ${#replicas[@]} replica(s); it takes two, so that one can serve while the other starts" >&2
  exit 1
fi
for replica in "${replicas[@]}"; do
  if ! is_healthy "$replica"; then
    say "$(about "$replica" .Name) isn't healthy, so no other one can be spared" >&2
    exit 1
  fi
done

cut_off=0
for replica in "${replicas[@]}"; do
  name=$(about "$replica" .Name)
  # As long as the container's stop_grace_period says; its exit code is 0 when everything accepted was answered.
  docker stop "$replica" >/dev/null
  code=$(about "$replica" .State.ExitCode)
  say "$name has stopped with exit code $code"
  if [[ $code != 0 ]]; then cut_off=1; fi
  if ! "$renew" "$replica"; then
    say "no healthy replica in the place of $name after at most $patience s; the others were left as they are" >&2
    exit 1
  fi
  say "a healthy replica is in the place of $name"
done
exit "$cut_off"
