// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package failpoint names every operation that changes state outside the process: a write to a file, a link, a
// queueing discipline, a BPF map, or an API object. In production, running an operation is a plain function call. A
// test supplies an Injector that counts the operations, makes them fail, or kills the process before or after one of
// them, and so covers every point where a crash can leave work half done, without a list of those points.
package failpoint

// Injector runs an operation. It may act before or after calling operation, or
// return an error without calling it. The nil Injector only calls operation.
type Injector func(name string, operation func() error) error

// Do runs the operation called name.
func (i Injector) Do(name string, operation func() error) error {
	if i == nil {
		return operation()
	}
	return i(name, operation)
}
