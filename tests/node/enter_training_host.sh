#!/bin/bash
# First process of a simulated host of a training job, in namespaces of its own: makes the container's disk,
# runs the container in a namespace of processes, notes its exit code, and stays, so that its disk does.
# What is written there goes to memory; of this machine nothing can be changed from there.
#   $1  folder shared with the simulator, /sim inside      $2  MiB of the job's volume
#   $3  whether /opt/ml is one mount, or each of its folders is: whole, each
set -e
sim=$1
mount --make-rprivate /
mount -t tmpfs -o mode=755 disk "$sim/disk"
mkdir "$sim"/disk/{changes,work,root,volume}
root=$sim/disk/root
mount -t overlay -o "lowerdir=/,upperdir=$sim/disk/changes,workdir=$sim/disk/work" disk "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 dev "$root/dev"
for device in null zero full random urandom; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
mkdir -p "$root"/dev/shm "$root"/{sim,opt/ml,root}
mount -t tmpfs shm "$root/dev/shm"
mount --bind "$sim" "$root/sim"
cp "$sim/hosts" "$root/etc/hosts"
if [ -e "$sim/image.tar.gz" ]; then
  mkdir "$root/fastlaunch"
  tar -xzf "$sim/image.tar.gz" -C "$root/fastlaunch" --no-same-owner
fi
hostname "$(cat "$sim/name")"

mount -t tmpfs -o "size=$2m" volume "$sim/disk/volume"
cp -r "$sim/ml" "$sim/disk/volume/ml"
mkdir -p "$sim"/disk/volume/{ml/{checkpoints,model,output,input/data},scratch} "$root/tmp/fastlaunch"
mount --bind "$sim/disk/volume/scratch" "$root/tmp/fastlaunch"
if [ "$3" = whole ]; then
  mount --bind "$sim/disk/volume/ml" "$root/opt/ml"
else
  for folder in checkpoints model output input; do
    mkdir -p "$root/opt/ml/$folder"
    mount --bind "$sim/disk/volume/ml/$folder" "$root/opt/ml/$folder"
  done
fi
mapfile -d '' -t command <"$sim/command"
mapfile -d '' -t environment <"$sim/environment"
touch "$sim/ready"
set +e
# shellcheck disable=SC2016 # expanded by the inner shell
unshare --mount --pid --fork --kill-child bash -c 'mount -t proc proc "$1/proc" && exec chroot "${@:1}"' enter \
  "$root" /usr/bin/env -i -C / "${environment[@]}" "${command[@]}" >"$sim/console.log" 2>&1 </dev/null &
echo $! >"$sim/unshare"
wait $!
echo $? >"$sim/exit.new" && mv "$sim/exit.new" "$sim/exit"
while :; do sleep 3600; done
