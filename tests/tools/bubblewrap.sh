#!/usr/bin/env bash
# As root on Debian or Ubuntu installs bubblewrap where it is missing, and says what it did. Never fails: without it the tests of the
# tool python take unshare, and skip what this machine cannot have by its name.
set -uo pipefail

if found=$(command -v bwrap); then echo "bubblewrap: $found"; exit 0; fi
if ! command -v apt-get >/dev/null; then reason="no apt-get here; put bwrap on PATH"
elif [ "$(id -u)" != 0 ]; then reason="only root may install it (apt-get install bubblewrap)"
else
  export DEBIAN_FRONTEND=noninteractive
  # without a network apt waits for minutes unless told not to
  apt=(timeout 300 apt-get -q -o Acquire::Retries=1 -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30)
  "${apt[@]}" update >/dev/null 2>&1
  reason="apt-get could not install it: $("${apt[@]}" install -y --no-install-recommends bubblewrap 2>&1 | grep -E '^E: ' | head -n 1)"
fi
if found=$(command -v bwrap); then echo "bubblewrap: $found"; else echo "bubblewrap: none, so sandboxes are tested by unshare alone: $reason"; fi
