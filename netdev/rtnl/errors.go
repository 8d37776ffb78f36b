// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package rtnl

import (
	"errors"

	"golang.org/x/sys/unix"
)

// IsNotFound reports whether the kernel refused a request because the object that it names does not
// exist: a namespace, a link, a qdisc, or a class. Which of the errors the kernel returns
// depends on the kind of object.
func IsNotFound(err error) bool {
	return errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT)
}
