# registers.awk - what ptxas -v said of each kernel, a file (sm_NN.log) an architecture: registers a
# thread. Fails where a kernel spills, or where it finds none.
function add(list, value) { return list == "" ? value : list " " value }
FNR == 1 { arch = FILENAME; sub(/.*\//, "", arch); sub(/\.log$/, "", arch); archs = add(archs, arch) }
/Compiling entry function/ {
    name = $0
    sub(/.*Compiling entry function '[^']*ILi/, "", name)
    sub(/EE.*/, "", name)
    split(name, part, "ELi")
    name = (part[1] == 3 ? "FP8" : part[1] == 4 ? "MXFP4" : "int4") ", " part[2] " tokens"
    if (!(name in seen)) order[++n] = name
    seen[name] = 1
}
/bytes stack frame/ && ($1 + $5 + $9) {
    print "registers.awk: " name " on " arch ": " $0
    bad = 1
}
/Used [0-9]+ registers/ {
    match($0, /Used [0-9]+/)
    used[name] = add(used[name], sprintf("%7s", substr($0, RSTART + 5, RLENGTH - 5)))
    found++
}
END {
    printf "%-16s", "registers"
    n_arch = split(archs, a, " ")
    for (i = 1; i <= n_arch; i++) printf "%7s%s", a[i], i == n_arch ? "\n" : " "
    for (i = 1; i <= n; i++) printf "%-16s%s\n", order[i], used[order[i]]
    if (!found) print "registers.awk: no kernels"
    exit bad || !found
}
