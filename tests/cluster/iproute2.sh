#!/usr/bin/env bash
# As root on Debian or Ubuntu installs iproute2 where it is missing, and says what it did. Never fails: without it the cluster in a
# box is skipped, except in CI, which demands it.
set -uo pipefail

if found=$(command -v ip); then echo "iproute2: $found"; exit 0; fi
if ! command -v apt-get >/dev/null; then reason="no apt-get here; put ip on PATH"
elif [ "$(id -u)" != 0 ]; then reason="only root may install it (apt-get install iproute2)"
else
  export DEBIAN_FRONTEND=noninteractive
  # without a network apt waits for minutes unless told not to
  apt=(timeout 300 apt-get -q -o Acquire::Retries=1 -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30)
  "${apt[@]}" update >/dev/null 2>&1
  reason="apt-get could not install it: $("${apt[@]}" install -y --no-install-recommends iproute2 2>&1 | grep -E '^E: ' | head -n 1)"
fi
if found=$(command -v ip); then echo "iproute2: $found"; else echo "iproute2: none, so no cluster in a box: $reason"; fi
