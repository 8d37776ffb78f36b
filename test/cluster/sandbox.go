// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
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

// Addresses inside a cluster. Clusters are isolated from each other, so all use
// the same.
const (
	serviceIP    = "10.96.0.1"
	serviceCIDR  = "10.96.0.0/24"
	dnsIP        = "10.96.0.10"
	gatewayIP    = "192.168.77.254" // the sandbox's side of the management network
	switchMTU    = 9000
	apiServerURL = "https://" + gatewayIP + ":443"
	// nodeServerURL is the URL that the nodes use.
	nodeServerURL = "https://" + serviceIP + ":443"
)

// switchAddresses are the addresses of the bridge that connects the nodes' NICs.
// The server for measurements listens on them.
var switchAddresses = []string{"10.20.255.254/16", "fd00:20::ffff/64"}

// featureGates maps values of --gates to feature gates. "all" turns on every gate
// of Kubernetes 1.37 for dynamic resource allocation and workloads that is off by
// default.
var featureGates = map[string]map[string]bool{
	"default": {},
	// Without consumable capacity the API server drops fields of published devices.
	"no-capacity": {"DRAConsumableCapacity": false},
	// As before Kubernetes 1.36: a user who may patch a claim's status may patch all of it.
	"no-granular-status": {"DRAResourceClaimGranularStatusAuthorization": false},
	// Before Kubernetes 1.36 consumable capacity is off by default.
	"capacity": {"DRAConsumableCapacity": true},
	// PodGroups of Kubernetes without their claims.
	"workload": {"GenericWorkload": true, "DRAWorkloadResourceClaims": false},
	"all": {
		"CompositePodGroup": true, "GenericWorkload": true, "DRAWorkloadResourceClaims": true, "WorkloadWithJob": true,
		"PodGroupPreemptionPolicy": true, "TopologyAwareWorkloadScheduling": true,
		"DRADerivedAttributes": true, "DRAFractionalCapacityRange": true, "DRADeviceCompatibilityGroups": true,
		"DRAListTypeAttributes": true, "DRANodeAllocatableResources": true, "DRAOptionalNodeOperations": true,
		"DRAPartitionableDevicesType": true, "DRAResourcePoolStatus": true,
	},
}

// schedulerConfiguration raises the rate limit of the scheduler's client: the
// default of 50 requests per second delays thousands of pods.
const schedulerConfiguration = `apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: false}
clientConnection: {kubeconfig: %s, qps: 1000, burst: 2000}
`

// auditPolicy makes the API server log the requests of service accounts, without their
// contents, to audit.log. The requests of Kubernetes' own components are not in it.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, userGroups: ["system:serviceaccounts"]}
- {level: None}
`

// gateFlags returns the --feature-gates flag according to the current options.
func (c *cluster) gateFlags() ([]string, error) {
	o, err := c.options()
	if err != nil {
		return nil, err
	}
	return gateFlag(featureGates[o.Gates]), nil
}

// kubeletFlags returns the --feature-gates flag of the kubelets.
func (c *cluster) kubeletFlags() ([]string, error) {
	o, err := c.options()
	if err != nil {
		return nil, err
	}
	gates, err := kubeletGates(o)
	return gateFlag(gates), err
}

// kubeletGates returns the feature gates of the kubelets. Before 1.35, a kubelet refuses
// the setting crashLoopBackOff unless a gate is on, which other components do not have.
func kubeletGates(o options) (map[string]bool, error) {
	number, err := minor(cmp.Or(o.Kubelet, o.Kubernetes))
	if err != nil {
		return nil, err
	}
	gates := map[string]bool{}
	maps.Copy(gates, featureGates[o.Gates])
	if number < 35 {
		gates["KubeletCrashLoopBackOffMax"] = true
	}
	return gates, nil
}

func gateFlag(gates map[string]bool) []string {
	var list []string
	for name, on := range gates {
		list = append(list, fmt.Sprintf("%s=%t", name, on))
	}
	return []string{"--feature-gates=" + strings.Join(list, ",")}
}

// apiFlags returns the feature gates for the API server and, with the gates of workloads, the
// flag that turns on the alpha and beta APIs.
func (c *cluster) apiFlags() ([]string, error) {
	flags, err := c.gateFlags()
	if err != nil {
		return nil, err
	}
	if o, err := c.options(); err != nil || o.Gates != "all" && o.Gates != "workload" {
		return flags, err
	}
	return append(flags, "--runtime-config="+
		"scheduling.k8s.io/v1beta1=true,scheduling.k8s.io/v1alpha3=true,resource.k8s.io/v1alpha3=true"), nil
}

// sandbox sets up the network, the control plane, and the nodes inside the
// cluster's namespaces, reports its progress, and runs until it is killed.
func (c *cluster) sandbox(ctx context.Context) error {
	status := os.NewFile(3, "status")
	syscall.CloseOnExec(3)
	if err := c.startSandbox(ctx, status); err != nil {
		report(status, statusFailed+"%s", strings.ReplaceAll(err.Error(), "\n", "; "))
		return err
	}
	report(status, statusReady)
	status.Close()
	<-ctx.Done()
	return nil
}

func (c *cluster) startSandbox(ctx context.Context, status io.Writer) error {
	o, err := c.options()
	if err != nil {
		return err
	}
	if err := sandboxMounts(); err != nil {
		return err
	}
	if err := sandboxLinks(); err != nil {
		return err
	}
	ca, err := c.certificates(o.Nodes)
	if err != nil {
		return err
	}
	// The nodes import images while the control plane starts.
	nodes := make(chan error, o.Nodes)
	for i := range o.Nodes {
		go func() { nodes <- c.startNode(ctx, i, o, status) }()
	}
	if err := c.startControlPlane(ctx, o, ca, status); err != nil {
		return err
	}
	if err := c.writeScripts(o); err != nil {
		return err
	}
	for range o.Nodes {
		err = errors.Join(err, <-nodes)
	}
	if err != nil {
		return err
	}
	return c.awaitNodes(ctx, o, ca, status)
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

// sandboxLinks creates two bridges: node0 for management traffic and switch for
// the shareable NICs. It also assigns the API server's service address to the
// loopback link, which makes kube-proxy unnecessary.
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

// connect creates a veth pair between a bridge of the sandbox and a node.
func connect(nodePID int, bridge, outside, inside string, mtu int) error {
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
	veth := &netlink.Veth{
		LinkAttrs: attrs, PeerName: inside, PeerMTU: uint32(mtu), PeerNamespace: netlink.NsFd(ns),
	}
	if err := netlink.LinkAdd(veth); err != nil {
		return fmt.Errorf("create %s: %w", outside, err)
	}
	return bringUp(outside)
}

func (c *cluster) certificates(nodes int) (*authority, error) {
	ca, err := newAuthority(c.path("pki"))
	if err != nil {
		return nil, err
	}
	err = errors.Join(
		ca.issue("apiserver", pkix.Name{CommonName: "kube-apiserver"}, "127.0.0.1", serviceIP, gatewayIP, "localhost",
			"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local"),
		ca.issue("admin", pkix.Name{CommonName: "admin", Organization: []string{"system:masters"}}),
		ca.issue("scheduler", pkix.Name{CommonName: "system:kube-scheduler"}),
		ca.kubeconfig(c.path("kubeconfig"), "admin", apiServerURL),
		ca.kubeconfig(c.path("pki", "scheduler.kubeconfig"), "scheduler", apiServerURL),
	)
	for i := range nodes {
		name := nodeName(i)
		err = errors.Join(err,
			ca.issueNode(i),
			ca.kubeconfig(c.path("pki", name+".kubeconfig"), name, nodeServerURL),
		)
	}
	return ca, err
}

func (c *cluster) startControlPlane(ctx context.Context, o options, ca *authority, status io.Writer) error {
	kube := o.Bin.Kube + "/kube"
	pki := func(file string) string { return c.path("pki", file) }
	component := func(name string, args ...string) daemon {
		return daemon{
			name: name, log: c.path("logs", name+".log"),
			argv: append([]string{kube, name}, args...), extraArgs: c.gateFlags, stopped: c.stopMarker(name),
		}
	}
	etcd := component("etcd", "--name=test", "--data-dir="+c.path("etcd"), "--unsafe-no-fsync",
		"--listen-client-urls=http://127.0.0.1:2379", "--advertise-client-urls=http://127.0.0.1:2379",
		"--listen-peer-urls=http://127.0.0.1:2380", "--initial-advertise-peer-urls=http://127.0.0.1:2380",
		"--initial-cluster=test=http://127.0.0.1:2380")
	audit := c.path("pki", "audit.yaml")
	if err := os.WriteFile(audit, []byte(auditPolicy), 0o644); err != nil {
		return err
	}
	apiserver := component("kube-apiserver", "--etcd-servers=http://127.0.0.1:2379",
		"--secure-port=443", "--bind-address=0.0.0.0", "--advertise-address="+gatewayIP, "--endpoint-reconciler-type=none",
		"--tls-cert-file="+pki("apiserver.crt"), "--tls-private-key-file="+pki("apiserver.key"),
		"--client-ca-file="+pki("ca.crt"),
		"--kubelet-client-certificate="+pki("admin.crt"), "--kubelet-client-key="+pki("admin.key"),
		"--kubelet-preferred-address-types=InternalIP", // node names do not resolve, which logs and exec would need
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file="+pki("service-account.pub"),
		"--service-account-signing-key-file="+pki("service-account.key"), "--service-cluster-ip-range="+serviceCIDR,
		"--allow-privileged=true", "--profiling=false",
		"--audit-policy-file="+audit, "--audit-log-path="+c.path("logs", "audit.log"),
		"--enable-aggregator-routing=true") // calls webhooks at their pods' addresses: kube-proxy does not run
	etcd.extraArgs, apiserver.extraArgs = nil, c.apiFlags
	controllers := component("kube-controller-manager", "--kubeconfig="+c.path("kubeconfig"), "--leader-elect=false",
		"--root-ca-file="+pki("ca.crt"), "--service-account-private-key-file="+pki("service-account.key"),
		// With a client per controller the default service account appears 9 s later.
		"--use-service-account-credentials=false", "--kube-api-qps=500", "--kube-api-burst=1000", "--bind-address=127.0.0.1")
	schedulerConfig := c.path("pki", "scheduler.yaml")
	configuration := fmt.Appendf(nil, schedulerConfiguration, pki("scheduler.kubeconfig"))
	if err := os.WriteFile(schedulerConfig, configuration, 0o644); err != nil {
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
	report(status, "kube-apiserver is live")
	return errors.Join(controllers.start(ctx), scheduler.start(ctx))
}

// awaitNodes returns when pods can run: the nodes are Ready and the default
// service account exists.
func (c *cluster) awaitNodes(ctx context.Context, o options, ca *authority, status io.Writer) error {
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

// startNode starts a node's process in its own network and mount namespaces,
// connects its links, and waits until its daemons run.
func (c *cluster) startNode(ctx context.Context, index int, o options, status io.Writer) error {
	name := nodeName(index)
	log, err := os.Create(c.path("logs", name+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	readyR, readyW, err := os.Pipe()
	if err != nil {
		return err
	}
	defer readyR.Close()
	cmd := exec.CommandContext(ctx, selfPath(), "node", "--dir", c.dir, "--name", name)
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
	go func() { _ = cmd.Wait() }() // if it ends, the node is not Ready, and its log says why
	readyW.Close()
	pid := cmd.Process.Pid
	err = errors.Join(
		connect(pid, "node0", "m-"+name, "node0", 1500),
		connect(pid, "switch", name+"-nic0", "nic0", switchMTU),
		connect(pid, "switch", name+"-nic1", "nic1", switchMTU),
		routePods(index),
		os.WriteFile(c.path(name+".pid"), []byte(strconv.Itoa(pid)), 0o644),
	)
	links.Close() // end-of-file tells the node that its links are connected
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
	report(status, "node %s: started %s and kubelet, imported images", name, o.Runtime)
	return nil
}

// routePods routes a node's pod addresses through the node.
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
	return netlink.RouteReplace(&netlink.Route{
		LinkIndex: bridge.Attrs().Index, Dst: dst, Gw: gw.IP, Flags: int(netlink.FLAG_ONLINK),
	})
}
