//go:build !crash

package main

import "github.com/dra-shared/dra-driver-shared/internal/failpoint"

// newFailpoints: steps are taken as they come. Built with the tag crash the plugin
// dies where a test tells it to.
func newFailpoints(string) failpoint.Injector { return nil }
