package main

import (
	"context"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Addresses inside a bed. Beds do not see each other, so all use the same.
const (
	serviceIP    = "10.96.0.1"
	serviceCIDR  = "10.96.0.0/24"
	dnsIP        = "10.96.0.10"
	gatewayIP    = "192.168.77.254" // the sandbox's side of the management network
	switchMTU    = 9000
	apiServerURL = "https://" + gatewayIP + ":443"
)

// switchAddresses make the sandbox a peer on the network the NICs are
// plugged into: the far end of a test's traffic.
var switchAddresses = []string{"10.20.255.254/16", "fd00:20::ffff/64"}

// featureGates by the --gates option, beside "default". "all" is every gate of Kubernetes 1.37
// for dynamic resource allocation and workloads that is off by default.
var featureGates = map[string]map[string]bool{
	"default": {},
	// A cluster that drops what we publish: no consumable capacity.
	"no-capacity": {"DRAConsumableCapacity": false},
	// Before Kubernetes 1.36 consumable capacity is off by default.
	"capacity": {"DRAConsumableCapacity": true},
	"all": {
		"CompositePodGroup": true, "GenericWorkload": true, "DRAWorkloadResourceClaims": true, "WorkloadWithJob": true,
		"PodGroupPreemptionPolicy": true, "TopologyAwareWorkloadScheduling": true,
		"DRADerivedAttributes": true, "DRAFractionalCapacityRange": true, "DRADeviceCompatibilityGroups": true, "DRAListTypeAttributes": true,
		"DRANodeAllocatableResources": true, "DRAOptionalNodeOperations": true, "DRAPartitionableDevicesType": true,
		"DRAResourcePoolStatus": true,
	},
}

// schedulerConfiguration: with the default of 50 requests in a second, thousands
// of pods would wait for the scheduler's client.
const schedulerConfiguration = `apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: false}
clientConnection: {kubeconfig: %s, qps: 1000, burst: 2000}
`

// gateFlags are those of a component, by the bed's options as they are now.
func (b *bed) gateFlags() ([]string, error) {
	o, err := b.options()
	if err != nil {
		return nil, err
	}
	var list []string
	for name, on := range featureGates[o.Gates] {
		list = append(list, fmt.Sprintf("%s=%t", name, on))
	}
	return []string{"--feature-gates=" + strings.Join(list, ",")}, nil
}

// apiFlags are those of the API server, which serves some of the APIs only if
// told to.
func (b *bed) apiFlags() ([]string, error) {
	flags, err := b.gateFlags()
	if err != nil {
		return nil, err
	}
	if o, err := b.options(); err != nil || o.Gates != "all" {
		return flags, err
	}
	return append(flags, "--runtime-config=scheduling.k8s.io/v1beta1=true,scheduling.k8s.io/v1alpha3=true,resource.k8s.io/v1alpha3=true"), nil
}

// sandbox is the bed from inside its namespaces: network, control plane,
// nodes. It runs until it is killed.
func (b *bed) sandbox(ctx context.Context) error {
	status := os.NewFile(3, "status")
	syscall.CloseOnExec(3)
	if err := b.startSandbox(ctx, status); err != nil {
		report(status, statusFailed+"%s", strings.ReplaceAll(err.Error(), "\n", "; "))
		return err
	}
	report(status, statusReady)
	status.Close()
	<-ctx.Done()
	return nil
}

func (b *bed) startSandbox(ctx context.Context, status io.Writer) error {
	o, err := b.options()
	if err != nil {
		return err
	}
	if err := sandboxMounts(); err != nil {
		return err
	}
	if err := sandboxLinks(); err != nil {
		return err
	}
	ca, err := b.certificates(o.Nodes)
	if err != nil {
		return err
	}
	// The nodes' runtimes import images while the control plane comes up.
	nodes := make(chan error, o.Nodes)
	for i := range o.Nodes {
		go func() { nodes <- b.startNode(ctx, i, o, status) }()
	}
	if err := b.startControlPlane(ctx, o, ca, status); err != nil {
		return err
	}
	if err := b.writeScripts(o); err != nil {
		return err
	}
	for range o.Nodes {
		err = errors.Join(err, <-nodes)
	}
	if err != nil {
		return err
	}
	return b.awaitNodes(ctx, o, ca, status)
}

func sandboxMounts() error {
	if err := privateMounts(); err != nil {
		return err
	}
	if err := mount("proc", "/proc", "proc", 0, ""); err != nil {
		return err
	}
	if err := mountSys(); err != nil {
		return err
	}
	if err := mountFresh("/run", "/var/log"); err != nil {
		return err
	}
	return shadowSysctls("/run/sysctl")
}

// sandboxLinks makes the two networks: node0 (management) and switch (where
// the shareable NICs are plugged in), and the API server's service address on
// the loopback link, which spares a kube-proxy.
func sandboxLinks() error {
	if err := bringUp("lo", serviceIP+"/32"); err != nil {
		return err
	}
	if err := addBridge("node0", 1500, gatewayIP+"/24"); err != nil {
		return err
	}
	if err := addBridge("switch", switchMTU, switchAddresses...); err != nil {
		return err
	}
	return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644)
}

func addBridge(name string, mtu int, addresses ...string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = name, mtu
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
		return fmt.Errorf("create bridge %s: %w", name, err)
	}
	return bringUp(name, addresses...)
}

func bringUp(name string, addresses ...string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	for _, a := range addresses {
		addr, err := netlink.ParseAddr(a)
		if err != nil {
			return err
		}
		addr.Flags = unix.IFA_F_NODAD
		if err := netlink.AddrAdd(link, addr); err != nil {
			return fmt.Errorf("address %s on %s: %w", a, name, err)
		}
	}
	return netlink.LinkSetUp(link)
}

// plug connects a node's link to one of the sandbox's bridges.
func plug(nodePID int, bridge, outside, inside string, mtu int) error {
	master, err := netlink.LinkByName(bridge)
	if err != nil {
		return err
	}
	ns, err := netns.GetFromPid(nodePID)
	if err != nil {
		return err
	}
	defer ns.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.MasterIndex = outside, mtu, master.Attrs().Index
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: inside, PeerMTU: uint32(mtu), PeerNamespace: netlink.NsFd(ns)}
	if err := netlink.LinkAdd(veth); err != nil {
		return fmt.Errorf("create %s: %w", outside, err)
	}
	return bringUp(outside)
}

func (b *bed) certificates(nodes int) (*authority, error) {
	ca, err := newAuthority(b.path("pki"))
	if err != nil {
		return nil, err
	}
	err = errors.Join(
		ca.issue("apiserver", pkix.Name{CommonName: "kube-apiserver"}, "127.0.0.1", serviceIP, gatewayIP, "localhost",
			"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"),
		ca.issue("admin", pkix.Name{CommonName: "admin", Organization: []string{"system:masters"}}),
		ca.issue("scheduler", pkix.Name{CommonName: "system:kube-scheduler"}),
		ca.kubeconfig(b.path("kubeconfig"), "admin", apiServerURL),
		ca.kubeconfig(b.path("pki", "scheduler.kubeconfig"), "scheduler", apiServerURL),
	)
	for i := range nodes {
		name := nodeName(i)
		err = errors.Join(err,
			ca.issue(name, pkix.Name{CommonName: "system:node:" + name, Organization: []string{"system:nodes"}}, name, nodeIP(i)),
			ca.kubeconfig(b.path("pki", name+".kubeconfig"), name, "https://"+serviceIP+":443"),
		)
	}
	return ca, err
}

func (b *bed) startControlPlane(ctx context.Context, o options, ca *authority, status io.Writer) error {
	kube := o.Bin.Kube + "/kube"
	pki := func(file string) string { return b.path("pki", file) }
	component := func(name string, args ...string) daemon {
		return daemon{name: name, log: b.path("logs", name+".log"), argv: append([]string{kube, name}, args...), more: b.gateFlags}
	}
	etcd := component("etcd", "--name=test", "--data-dir="+b.path("etcd"), "--unsafe-no-fsync",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380",
		"--initial-cluster=test=http://127.0.0.1:2380")
	apiserver := component("kube-apiserver", "--etcd-servers=http://127.0.0.1:2379",
		"--secure-port=443", "--bind-address=0.0.0.0", "--advertise-address="+gatewayIP, "--endpoint-reconciler-type=none",
		"--tls-cert-file="+pki("apiserver.crt"), "--tls-private-key-file="+pki("apiserver.key"), "--client-ca-file="+pki("ca.crt"),
		"--kubelet-client-certificate="+pki("admin.crt"), "--kubelet-client-key="+pki("admin.key"),
		"--kubelet-preferred-address-types=InternalIP", // names do not resolve here: logs and exec would fail
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+pki("service-account.pub"),
		"--service-account-signing-key-file="+pki("service-account.key"), "--service-cluster-ip-range="+serviceCIDR,
		"--allow-privileged=true", "--profiling=false",
		"--enable-aggregator-routing=true") // webhooks are called at their pods: there is no kube-proxy
	etcd.more, apiserver.more = nil, b.apiFlags
	controllers := component("kube-controller-manager", "--kubeconfig="+b.path("kubeconfig"), "--leader-elect=false",
		"--root-ca-file="+pki("ca.crt"), "--service-account-private-key-file="+pki("service-account.key"),
		// With a client per controller the default service account comes 9 s late.
		"--use-service-account-credentials=false", "--kube-api-qps=500", "--kube-api-burst=1000", "--bind-address=127.0.0.1")
	schedulerConfig := b.path("pki", "scheduler.yaml")
	if err := os.WriteFile(schedulerConfig, fmt.Appendf(nil, schedulerConfiguration, pki("scheduler.kubeconfig")), 0o644); err != nil {
		return err
	}
	scheduler := component("kube-scheduler", "--config="+schedulerConfig, "--bind-address=127.0.0.1")

	if err := errors.Join(etcd.start(ctx), apiserver.start(ctx)); err != nil {
		return err
	}
	client, err := ca.client("admin")
	if err != nil {
		return err
	}
	if err := await(ctx, "kube-apiserver", func() error { return get(client, "/livez", nil) }); err != nil {
		return err
	}
	report(status, "kube-apiserver answers")
	return errors.Join(controllers.start(ctx), scheduler.start(ctx))
}

// awaitNodes returns when pods can run: nodes Ready, default service account there.
func (b *bed) awaitNodes(ctx context.Context, o options, ca *authority, status io.Writer) error {
	client, err := ca.client("admin")
	if err != nil {
		return err
	}
	for i := range o.Nodes {
		name := nodeName(i)
		if err := await(ctx, "node "+name, func() error { return nodeReady(client, name) }); err != nil {
			return err
		}
		report(status, "node %s is Ready", name)
	}
	return await(ctx, "service account default/default", func() error {
		return get(client, "/api/v1/namespaces/default/serviceaccounts/default", nil)
	})
}

func nodeReady(client *http.Client, name string) error {
	var node struct {
		Status struct {
			Conditions []struct{ Type, Status, Message string }
		}
	}
	if err := get(client, "/api/v1/nodes/"+name, &node); err != nil {
		return err
	}
	for _, c := range node.Status.Conditions {
		if c.Type == "Ready" {
			if c.Status == "True" {
				return nil
			}
			return errors.New(c.Message)
		}
	}
	return errors.New("no Ready condition yet")
}

func get(client *http.Client, path string, into any) error {
	resp, err := client.Get(apiServerURL + path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s: %.200s", path, resp.Status, body)
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(body, into)
}

// startNode starts a node's process in namespaces of its own, plugs in its
// links and lets it go on.
func (b *bed) startNode(ctx context.Context, index int, o options, status io.Writer) error {
	name := nodeName(index)
	log, err := os.Create(b.path("logs", name+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	readyR, readyW, err := os.Pipe()
	if err != nil {
		return err
	}
	defer readyR.Close()
	cmd := exec.CommandContext(ctx, selfPath(), "node", "--dir", b.dir, "--name", name)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{readyW}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS}
	links, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	go func() { _ = cmd.Wait() }() // its end shows as a node that is not Ready, and in its log
	readyW.Close()
	pid := cmd.Process.Pid
	err = errors.Join(
		plug(pid, "node0", "m-"+name, "node0", 1500),
		plug(pid, "switch", name+"-nic0", "nic0", switchMTU),
		plug(pid, "switch", name+"-nic1", "nic1", switchMTU),
		routePods(index),
		os.WriteFile(b.path(name+".pid"), []byte(strconv.Itoa(pid)), 0o644),
	)
	links.Close() // end-of-file: the links are there
	if err != nil {
		return err
	}
	result, err := io.ReadAll(readyR)
	if err != nil {
		return err
	}
	if string(result) != nodeStarted {
		return fmt.Errorf("node %s: %s", name, result)
	}
	report(status, "node %s: containerd runs, images imported, kubelet started", name)
	return nil
}

func routePods(index int) error {
	bridge, err := netlink.LinkByName("node0")
	if err != nil {
		return err
	}
	dst, err := netlink.ParseIPNet(podCIDR(index))
	if err != nil {
		return err
	}
	gw, err := netlink.ParseIPNet(nodeIP(index) + "/24")
	if err != nil {
		return err
	}
	return netlink.RouteReplace(&netlink.Route{LinkIndex: bridge.Attrs().Index, Dst: dst, Gw: gw.IP, Flags: int(netlink.FLAG_ONLINK)})
}
