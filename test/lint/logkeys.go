// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import "strings"

// logKeys are the keys that log messages may have. One thing has the same key in all messages, so a search for the key
// finds them: before you add a key, look for one with the same meaning. A singular is the name of an object, a plural
// is a list or a number of objects. Durations until the next attempt are called delay.
var logKeys = setOf(`
	accelerator added address addressCount addressPool addresses attachPoint attachments attempts bitsPerSecond
	block blocks check claim claimUID claims class clusterRole condition consequence count deallocated delay
	detached detected device deviceCount deviceNodes devicesChanged differingResults dnsNames endpoints err
	exclusive hosts interface kind link linkDown linksChanged mac mode modified namespacesChanged
	namespacesMissed namespacesRemoved network node nodes notAfter operation path pod podGroup podGroupVersions
	pods qdiscsChanged ranges reason records refusal removed request resource resync running secret senderKey
	server service share shares slice threshold unprotected used
`)

// setOf returns the words in text.
func setOf(text string) map[string]bool {
	set := map[string]bool{}
	for word := range strings.FieldsSeq(text) {
		set[word] = true
	}
	return set
}
