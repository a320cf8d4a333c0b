#!/bin/sh
# build_opentofu.sh FOLDER: builds OpenTofu from its Go module into FOLDER/tofu.
set -eu
version=v1.12.6
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
go mod download "github.com/opentofu/opentofu@$version"
# `go install` refuses modules with replace directives, so a copy is built.
cp -r "$(go env GOMODCACHE)/github.com/opentofu/opentofu@$version" "$work/source"
chmod -R u+w "$work/source"
mkdir -p "$1"
(cd "$work/source" && CGO_ENABLED=0 go build -o "$work/tofu" ./cmd/tofu)
mv "$work/tofu" "$1/tofu"
