// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import "strings"

// logKeys are the keys that log messages may have. One thing has the same key in all messages, so a search for the key
// finds them: before you add a key, look for one with the same meaning. A singular is the name of an object, a plural
// is a list of objects, and the key of a number of objects ends in Count. Durations until the next attempt are called
// delay.
var logKeys = setOf(`
	accelerator addedCount address addressCount addresses addressPool attachmentCount attachPoint attempts
	bitsPerSecond block blockCount check claim claimCount claimUID class clusterRole condition consequence
	deallocated delay detached detected device deviceCount deviceNodes devicesChanged differingResults
	dnsNames endpointCount err exclusive hosts interface kind link linkDown linksChanged mac mode modified
	namespacesChanged namespacesMissed namespacesRemoved network node nodeCount nodes notAfter operation
	orphan path pod podCount podGroup podGroupVersions pods poolCount qdiscsChanged ranges reason
	recordCount records refusal removedCount request resync running runningPodCount secret senderKey server
	service share shareCount slice threshold unprotected usedAddressCount
`)

// setOf returns the words in text.
func setOf(text string) map[string]bool {
	set := map[string]bool{}
	for word := range strings.FieldsSeq(text) {
		set[word] = true
	}
	return set
}
