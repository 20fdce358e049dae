#!/usr/bin/env bash
# Builds the kernels with AddressSanitizer and UndefinedBehaviorSanitizer and makes random calls of them (tools/fuzz.cpp), each checked for
# what it reads, what it writes and what it says; then forks a process whose threads are at work. A failed case prints its seed.
#
#   bash tools/sanitize.sh [--brief] [--threads] [--seconds N] [--seed S]
#   bash tools/sanitize.sh --case SEED                  that case again
#
# --brief checks less of what AddressSanitizer sees anyhow, and for a shorter time. --threads builds with ThreadSanitizer instead, and eight
# threads call at once. OUT names a folder for the objects (build/sanitize), CXX the compiler, JOBS how many processes may run at once.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cxx=${CXX:-g++}
jobs=${JOBS:-2}
brief= threads= seconds= seed= case=
while [ $# -gt 0 ]; do
    case $1 in
        --brief) brief=1 ;;
        --threads) threads=1 ;;
        --seconds) seconds=$2 && shift ;;
        --seed) seed=$2 && shift ;;
        --case) case=$2 && shift ;;
        *) sed -n '/^#   bash/s/^# *//p' "${BASH_SOURCE[0]}" >&2 && exit 2 ;;
    esac
    shift
done
seconds=${seconds:-${brief:+15}}
seconds=${seconds:-180}
seed=${seed:-1}

# The flags are those of CMakeLists.txt; -O1, since -O3 takes long and hides what is wrong.
flags_of() { sed -n "s/^set(ANYMAX_FLAGS$1 \(.*\))$/\1/p" "$root/CMakeLists.txt"; }
common="-std=c++17 $(flags_of '') -O1 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=all"
if [ -n "$threads" ]; then
    name=thread checks="-fsanitize=thread"
else
    name=address checks="-fsanitize=address,undefined,float-cast-overflow -fno-sanitize=vptr"
    [ -z "$brief" ] || name=brief checks="$checks,null,object-size,pointer-overflow"
fi
case $(uname -m) in
    x86_64 | amd64)
        units="baseline avx2"
        if grep -qs '^flags.* avx512f .*' /proc/cpuinfo && grep -qs avx512vl /proc/cpuinfo; then units="$units avx512"; fi
        ;;
    aarch64 | arm64) units=neon ;;
    *) units=baseline ;;
esac
have=
for unit in $units; do have="$have -DANYMAX_HAVE_${unit^^}=1"; done

out=${OUT:-$root/build/sanitize}/$name
mkdir -p "$out"

# compile OBJECT SOURCE FLAGS...: unless the object is newer than all that it may depend on
compile() {
    local object=$out/$1 source=$2
    shift 2
    if [ ! -e "$object" ] || [ -n "$(find "$root/csrc" "$root/tools/fuzz.cpp" "${BASH_SOURCE[0]}" "$root/CMakeLists.txt" -newer "$object" -print -quit)" ]; then
        echo "$cxx" "$@" -c "$source" -o "$object"
    fi
}
{
    for unit in avx512 avx2 baseline neon; do
        [[ " $units " != *" $unit "* ]] || for file in "$root"/csrc/units/*.cpp; do
            compile "$(basename "$file" .cpp)_on_$unit.o" "$file" $common $checks -fno-exceptions -fno-rtti $(flags_of "_${unit^^}") "-DANYMAX_UNIT=$unit" -I "$root/csrc"
        done
    done
    for file in abi order fused ragged pool xla_ffi; do
        compile $file.o "$root/csrc/doors/$file.cpp" $common $checks -fno-exceptions -fno-rtti $have -I "$root/csrc"
    done
    # the driver itself would take most of the time under ThreadSanitizer; it shares nothing but atomics
    [ -z "$threads" ] && driver="$checks -fno-sanitize-recover=all" || driver=
    compile fuzz.o "$root/tools/fuzz.cpp" -std=c++17 -O2 -g1 -Wall -Wextra -fno-omit-frame-pointer $driver $have -I "$root/csrc"
} >"$out/commands"
xargs -P "$jobs" -I {} bash -c '{}' <"$out/commands"
"$cxx" $checks "$out"/*.o -o "$out/fuzz" -pthread

export UBSAN_OPTIONS=print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1
address="detect_leaks=1:strict_string_checks=1:quarantine_size_mb=32:max_malloc_fill_size=1073741824"
if [ -n "$case" ]; then
    ASAN_OPTIONS=$address:malloc_fill_byte=255 exec "$out/fuzz" "$case"
elif [ -n "$threads" ]; then
    for unit in $units; do ANYMAX_ISA=$unit "$out/fuzz" --threads --seconds "$seconds" --from "$seed"; done
    exit
fi
# Fresh memory is full of NaNs for one process and of 0.747 for the next: what is used before it is set shows in the results.
ASAN_OPTIONS=$address "$out/fuzz" --refused
ASAN_OPTIONS=$address "$out/fuzz" --fork
ASAN_OPTIONS=$address "$out/fuzz" --writers --seconds $((brief ? 5 : 20))
running=() status=0
for ((i = 0; i < jobs; i++)); do
    ASAN_OPTIONS=$address:malloc_fill_byte=$((i % 2 ? 63 : 255)) "$out/fuzz" --seconds "$seconds" --from $((seed + i)) --step "$jobs" --table &
    running+=($!)
done
for process in "${running[@]}"; do wait "$process" || status=1; done
exit $status
