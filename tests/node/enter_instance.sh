#!/bin/bash
# First process of a simulated instance, in namespaces of its own: makes its disk, network and programs, and
# runs its user data. What is written there goes to memory; of this machine nothing can be changed from there.
#   $1  folder shared with the simulator, /sim inside      $2  MiB of instance store
set -e
sim=$1
mount --make-rprivate /
mount -t tmpfs -o mode=755 disk "$sim/disk"
mkdir "$sim"/disk/{changes,work,root}
root=$sim/disk/root
mount -t overlay -o "lowerdir=/,upperdir=$sim/disk/changes,workdir=$sim/disk/work" disk "$root"
mount -t proc proc "$root/proc"
[ ! -e "$root/proc/sysrq-trigger" ] || mount --bind /dev/null "$root/proc/sysrq-trigger"
mount -t sysfs -o ro sys "$root/sys"
mount -t tmpfs -o mode=755 run "$root/run"
mount -t tmpfs -o mode=755 dev "$root/dev"
for device in null zero full random urandom; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
ln -s fd/0 "$root/dev/stdin"
ln -s fd/1 "$root/dev/stdout"
ln -s fd/2 "$root/dev/stderr"
mkdir -p "$root"/dev/shm "$root"/{sim,opt/dlami/nvme,etc/systemd/system,root}
mount -t tmpfs shm "$root/dev/shm"
mount --bind "$sim" "$root/sim"
# Whoever names these by their path gets the simulator's too.
for program in shutdown poweroff reboot halt systemctl sysctl; do
  for place in usr/bin usr/sbin; do
    [ ! -e "$root/$place/$program" ] || cp --remove-destination "$sim/bin/$program" "$root/$place/$program"
  done
done
ip link set lo up
ip address add 169.254.169.254/32 dev lo
ip address add 10.254.0.1/32 dev lo
touch "$sim/ready"
until [ -e "$sim/go" ]; do sleep 0.02; done
if [ "$2" -gt 0 ]; then
  # A folder of this machine, if the simulator made one: a daemon outside has to see what lies there.
  if [ -d "$sim/nvme" ]; then store=(--bind "$sim/nvme"); else store=(-t tmpfs -o "size=$2m" nvme); fi
  (sleep 0.2 && mount "${store[@]}" "$root/opt/dlami/nvme") &
fi
# As cloud-init does: a file of its own, no HOME, the output to the console.
mapfile -t environment <"$sim/environment"
env -i "${environment[@]}" chroot "$root" /sim/user-data >"$sim/console.log" 2>&1 </dev/null &
while :; do sleep 3600; done
