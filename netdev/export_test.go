package netdev

import (
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/dra-shared/dra-driver-shared/netdev/rtnl"
)

// What the benchmark's floor is made of: the bare messages of an attach.
var (
	CreateRequest     = createRequest
	ConfigureRequests = configureRequests
	UpRequests        = upRequests
)

// AddressByNamespaceID asks for an address on a link in the namespace with that
// ID, through a socket of the node's.
func AddressByNamespaceID(conn *rtnl.Conn, nsid, index int, address netip.Prefix) error {
	r := addressRequest(index, address)
	r.AddData(nl.NewRtAttr(unix.IFA_TARGET_NETNSID, nl.Uint32Attr(uint32(nsid))))
	return conn.Do(r)
}
