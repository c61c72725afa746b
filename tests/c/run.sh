#!/bin/sh
# run.sh PROGRAM... - runs every test program, shows what it prints, and ends with the total. A
# program that ends with "N passed, N failed" brings its own counts, any other counts as one. RUN, if
# set, is the emulator that runs them.
passed=0 failed=0
for program in "$@"; do
    name=$(basename "$program")
    out=$($RUN "$program" 2>&1)
    rc=$?
    last=$(printf '%s\n' "$out" | tail -n 1)
    case $last in
    *[0-9]" passed, "[0-9]*" failed")
        p=${last%% passed*} p=${p##* } f=${last##*passed, } f=${f%% failed*} ;;
    *) p=1 f=0 ;;
    esac
    if [ "$rc" -ne 0 ] && [ "$f" -eq 0 ]; then p=0 f=1; fi
    if [ "$rc" -ne 0 ]; then printf '%s\n' "$out"; fi
    printf '%-20s %s (exit %d)\n' "$name" "$p passed, $f failed" "$rc"
    passed=$((passed + p)) failed=$((failed + f))
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
