#!/bin/sh
# Makes the base images that the build needs from Debian packages alone, for machines that can pull no image:
# collm-test/base (Python), collm-test/build (the same, with this machine's pip configuration and wheels),
# collm-test/redis. Needs root, debootstrap and a Docker engine. Keeps images that are already there.
set -eu

SUITE=bookworm
MIRROR=${DEBIAN_MIRROR:-}
PYTHON=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

have() { docker image inspect "$1" >/dev/null 2>&1; }

if ! have collm-test/base; then
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$SUITE" "$work/root" ${MIRROR:+"$MIRROR"} >"$work/log" 2>&1 ||
        { tail -20 "$work/log"; exit 1; }
    cp /etc/ssl/certs/ca-certificates.crt "$work/root/etc/ssl/certs/ca-certificates.crt"
    rm -rf "$work/root/var/cache/apt/archives" "$work/root/var/lib/apt/lists" "$work/root/usr/share/doc"
    tar -C "$work/root" -c . | docker import --change 'ENV PYTHONDONTWRITEBYTECODE=1' - collm-test/base >/dev/null
fi

if ! have collm-test/build; then
    mkdir -p "$work/build/wheels"
    printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\nfind-links = /wheels\n' >"$work/build/pip.conf"
    # Local folders of wheels that pip uses here, if any.
    for folder in $("$PYTHON" -m pip config list | sed -n "s/^.*find-links='\(.*\)'$/\1/p") ; do
        [ -d "$folder" ] && find "$folder" -maxdepth 1 -name '*.whl' -exec cp -n {} "$work/build/wheels/" \;
    done
    printf 'FROM collm-test/base\nCOPY pip.conf /etc/pip.conf\nCOPY wheels /wheels\n' >"$work/build/Dockerfile"
    docker build --quiet -t collm-test/build "$work/build" >/dev/null
fi

if ! have collm-test/redis; then
    mkdir -p "$work/redis"
    cat >"$work/redis/Dockerfile" <<'DOCKERFILE'
FROM collm-test/base
RUN apt-get update && apt-get install -y --no-install-recommends redis-server redis-tools \
    && rm -rf /var/lib/apt/lists/* && mkdir -p /data && chown redis:redis /data
WORKDIR /data
DOCKERFILE
    docker build --quiet -t collm-test/redis "$work/redis" >/dev/null
fi
