#!/bin/sh
# install.sh [DESTDIR]: the systemd units, users, folders and settings of hrxmp, under DESTDIR.
# BINDIR says where the programs hrxmp-run, hrxmp-aggregator and hrxmp-workers are installed.
# A settings file that is there already stays; the new one is put beside it as hrxmp.env.new.
set -eu
root=${1:-}
bindir=${BINDIR:-/opt/hrxmp/bin}
units=$root${UNITDIR:-/usr/lib/systemd/system}
cd "$(dirname "$0")"

put() { # put FILE TARGET: one file, with the programs' folder filled in
    mkdir -p "$(dirname "$2")"
    sed "s|@BINDIR@|$bindir|g" "$1" >"$2.part"
    chmod 644 "$2.part"
    mv "$2.part" "$2"
}

for unit in hrxmp.target hrxmp-*.socket hrxmp-*.service; do
    put "$unit" "$units/$unit"
done
put hrxmp-.service.d/10-common.conf "$units/hrxmp-.service.d/10-common.conf"
put hrxmp.sysusers "$root/usr/lib/sysusers.d/hrxmp.conf"
put hrxmp.tmpfiles "$root/usr/lib/tmpfiles.d/hrxmp.conf"
put grafana-dashboard.json "$root/usr/share/hrxmp/grafana-dashboard.json"
put alerts.yml "$root/usr/share/hrxmp/alerts.yml"
settings=$root/etc/hrxmp/hrxmp.env
if [ -e "$settings" ] && ! cmp -s hrxmp.env "$settings"; then settings=$settings.new; fi
put hrxmp.env "$settings"

if [ -z "$root" ]; then
    systemd-sysusers /usr/lib/sysusers.d/hrxmp.conf
    systemd-tmpfiles --create /usr/lib/tmpfiles.d/hrxmp.conf
    systemctl daemon-reload
    [ -x "$bindir/hrxmp-run" ] || echo "install hrxmp itself into $bindir/.. (docs/deploy.md)" >&2
fi
