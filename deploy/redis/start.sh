#!/bin/sh
# Fills passwords (variables like DISPATCHER_PASSWORD, kept as hashes) into the list of users, then runs the broker.
set -eu

users=/tmp/users.acl
commands='+@read +@write +@stream +@connection +@transaction +@scripting +time -@dangerous +info'
while read -r word name rest; do
    secret=$(printenv "$(echo "$name" | tr '[:lower:]' '[:upper:]')_PASSWORD" || true)
    hash=$(printf %s "$secret" | sha256sum | cut -d ' ' -f 1)
    echo "$word $name $rest" | sed -e "s/ PASSWORD / #$hash /" -e "s/ COMMANDS / $commands /"
done </etc/collm/users.acl >"$users"
exec redis-server /etc/collm/redis.conf --aclfile "$users"
