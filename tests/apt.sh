#!/usr/bin/env bash
# apt.sh PROGRAM PACKAGE WITHOUT: as root on Debian or Ubuntu installs a package where its program is missing, and says what it did.
# Never fails: WITHOUT says what the tests do then (they skip, or take another way; some in CI demand it).
set -uo pipefail
program=$1 package=$2 without=$3

if found=$(command -v "$program"); then echo "$package: $found"; exit 0; fi
if ! command -v apt-get >/dev/null; then reason="no apt-get here; put $program on PATH"
elif [ "$(id -u)" != 0 ]; then reason="only root may install it (apt-get install $package)"
else
  export DEBIAN_FRONTEND=noninteractive
  # without a network apt waits for minutes unless told not to
  apt=(timeout 300 apt-get -q -o Acquire::Retries=1 -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30)
  "${apt[@]}" update >/dev/null 2>&1
  reason="apt-get could not install it: $("${apt[@]}" install -y --no-install-recommends "$package" 2>&1 | grep -E '^E: ' | head -n 1)"
fi
if found=$(command -v "$program"); then echo "$package: $found"; else echo "$package: none, $without: $reason"; fi
