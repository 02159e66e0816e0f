#!/bin/sh
# Intel's CPU runtime exists for x86-64 only; elsewhere Debian's PoCL is the device.
ls /etc/OpenCL/vendors/*.icd >/dev/null 2>&1 && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get update -qq && apt-get install -y -qq pocl-opencl-icd >/dev/null && exit 0
fi
echo "hrxmp: this machine has no OpenCL device yet. Install PoCL (Debian, Ubuntu: as root," \
     "apt-get install pocl-opencl-icd) or your GPU vendor's driver, then run make again." >&2
exit 1
