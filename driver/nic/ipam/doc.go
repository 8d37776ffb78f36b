// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

// Package ipam assigns AddressPool addresses to pod links on one node.
//
// A node takes blocks of addresses from a pool and assigns single addresses from its blocks, without the API server.
// A block is an AddressBlock, an object that the node's plugin creates. The Allocator keeps two nodes from having the
// same address: it chooses addresses that none of the network's blocks has, creates its block, and lists the
// network's blocks again. If another block overlaps its own, it deletes its own before assigning an address from it,
// and chooses again. The API server orders the creations, and its lists are consistent: if two blocks overlap, the
// node that created the later one sees the earlier one. Blocks never gain addresses.
//
// A plugin may be killed, or not get a response, between the creation and the list. When the Allocator rereads the
// node's blocks, it returns the addresses that are also in another block, except the ones that its attachments use:
// these were assigned after the list. Blocks with addresses that attachments used before the creation are marked as
// unchecked until after the list (see validate and takeBack).
//
// An assigned address is part of the attachment record, which the driver writes before the link exists and removes
// after the link is deleted. The records are the only store: an address is in use if and only if a record contains
// it. While a record cannot be read, the Allocator withholds all addresses that it may contain (see withhold). Two
// plugins on one node, as in a rolling update, use locks (see nodeLock). The files are:
//
//	allocator.go  request -> address from the node's blocks
//	acquire.go    claim that is prepared -> blocks that only this claim can use
//	take.go       free addresses of a pool -> another block of the node
//	maintain.go   unused addresses -> back to the pool
//	load.go       blocks and records -> what the Allocator knows
//	lost.go       addresses that the node uses and no longer has
//	consumer.go   blocks for one pod or namespace
//	blocks.go     AddressBlocks: their addresses, and API requests for them
//	pools.go      AddressPools
//	locks.go      the locks that the node's plugins share
//	api.go        the API server
package ipam
