#!/usr/bin/env bash
# The Chromium that opens reports in a test.
#   chromium.sh find      prints its path; where there is none, the reason, and ends with 1
#   chromium.sh install   as root on Debian or Ubuntu installs it where none is found. Never fails: the test says why it is skipped
set -uo pipefail

find_chromium() {
  local name path
  for name in chromium chromium-browser google-chrome; do
    if path=$(command -v "$name"); then echo "$path"; return; fi
  done
  # Playwright's, newest last
  path=$(ls -d "${PLAYWRIGHT_BROWSERS_PATH:-${HOME:-/root}/.cache/ms-playwright}"/chromium-*/chrome-linux*/chrome 2>/dev/null | tail -n 1)
  [ -n "$path" ] && echo "$path"
}

why_not() {
  if ! command -v apt-get >/dev/null; then echo "no apt-get here; put chromium on PATH"
  elif [ "$(id -u)" != 0 ]; then echo "only root may install it (apt-get install chromium)"
  elif [ $# -gt 0 ]; then echo "apt-get could not install it: $1"
  else echo "\`make test\` installs it (apt-get install chromium)"; fi
}

install_chromium() {
  local log last
  log=$(mktemp)
  export DEBIAN_FRONTEND=noninteractive
  # without a network apt waits for minutes unless told not to
  local apt=(timeout 600 apt-get -q -o Acquire::Retries=1 -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30)
  { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends chromium; } >"$log" 2>&1
  last=$(grep -E '^E: ' "$log" | head -n 1)
  rm -f "$log"
  echo "${last:-ended without chromium on PATH}"
}

case ${1:-} in
  find)
    find_chromium || { echo "no chromium on this machine: $(why_not)"; exit 1; }
    ;;
  install)
    if found=$(find_chromium); then echo "chromium: $found"; exit 0; fi
    reason=$(why_not)
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
      echo "chromium: installing it with apt-get (a minute)"
      reason=$(why_not "$(install_chromium)")
    fi
    if found=$(find_chromium); then echo "chromium: $found"; else echo "chromium: none, so the test that opens a report in it is skipped: $reason"; fi
    ;;
  *)
    echo "usage: $0 find|install" >&2
    exit 2
    ;;
esac
exit 0
