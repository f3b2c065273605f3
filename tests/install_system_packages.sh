#!/usr/bin/env bash
# Installs the system packages that tests skip without: for continuous integration, as root, on Debian or Ubuntu.
# Returns at once where all of them are there. run_tests.sh calls it if CI=true.
set -euo pipefail

packages=()
command -v chromium chromium-browser google-chrome >/dev/null || packages+=(chromium)
command -v strace >/dev/null || packages+=(strace)
command -v mount umount >/dev/null || packages+=(mount)
command -v unshare >/dev/null || packages+=(util-linux)
((${#packages[@]} > 0)) || exit 0

if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    echo "install_system_packages.sh: tests will be skipped without: ${packages[*]}; install them (it takes root)" >&2
    exit 0
fi
echo "install_system_packages.sh: apt-get install ${packages[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
