#!/usr/bin/env bash
# Installs the system packages that tests skip without: for continuous integration, as root, on Debian or Ubuntu.
# Returns at once where all of them are there. run_tests.sh calls it if CI=true.
set -euo pipefail

packages=() cluster=()
command -v chromium chromium-browser google-chrome >/dev/null || packages+=(chromium)
command -v strace >/dev/null || packages+=(strace)
command -v etcd >/dev/null || packages+=(etcd-server)
command -v prometheus promtool >/dev/null || packages+=(prometheus)
command -v mount umount >/dev/null || packages+=(mount)
command -v unshare nsenter setpriv >/dev/null || packages+=(util-linux)
# For tests/cluster
command -v ip tc >/dev/null || cluster+=(iproute2)
command -v ssh ssh-keygen >/dev/null || cluster+=(openssh-client)
command -v sshd >/dev/null || cluster+=(openssh-server)
command -v pdsh >/dev/null || cluster+=(pdsh)
command -v munged >/dev/null || cluster+=(munge)
command -v slurmctld slurmd srun >/dev/null || cluster+=(slurm-wlm)
((${#packages[@]} + ${#cluster[@]} > 0)) || exit 0

if ((EUID != 0)) || ! command -v apt-get >/dev/null; then
    echo "install_system_packages.sh: tests will be skipped without: ${packages[*]} ${cluster[*]}; install them (it takes root)" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
install() {
    echo "install_system_packages.sh: apt-get install $*" >&2
    apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}
((${#packages[@]} == 0)) || install "${packages[@]}"
# Tests of many hosts are skipped where there can be no cluster; so they are where its packages cannot be had.
((${#cluster[@]} == 0)) || install "${cluster[@]}" ||
    echo "install_system_packages.sh: tests/cluster will be skipped without: ${cluster[*]}" >&2
